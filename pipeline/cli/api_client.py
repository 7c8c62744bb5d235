"""A client of the HTTP API of a running Saccade. Every error message is one line."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

import httpx

from saccade.addresses import with_plain_zone

_ANSWER_S = 130.0  # longer than the server's own limit for an answer
_MAX_BYTES = 32 * 1024 * 1024


class ApiError(Exception):
    """Raised if the HTTP server rejects a request or does not respond. The message is one line."""


class ApiClient:
    """A client of the HTTP API of a running Saccade.

    Args:
        url: URL of the server, such as http://127.0.0.1:8080.
        token: bearer token, or None.

    Raises:
        ValueError: if the URL is not an HTTP URL.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        url = with_plain_zone(url)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("expected the address of a running Saccade, such as http://127.0.0.1:8080")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        timeout = httpx.Timeout(_ANSWER_S, connect=10)
        self._session = httpx.AsyncClient(headers=self._headers, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.aclose()

    async def streams(self) -> list[dict[str, Any]]:
        """Return the streams of a running Saccade, each with its state.

        Raises:
            ApiError: if the request fails.
        """
        listed: list[dict[str, Any]] = (await self._json("GET", "/streams"))["streams"]
        return listed

    async def frame(self, stream: str, *, drawn: bool) -> bytes:
        """Return the next frame of a stream as JPEG. If `drawn` is True, the image shows boxes and labels."""
        overlay = "" if drawn else "?overlay=off"
        return await self._request("GET", f"/streams/{quote(stream, safe='')}/frame.jpg{overlay}")

    async def detect(self, image: str, name: str) -> list[dict[str, Any]]:
        """Detect the objects with a label in an image. Return their bounding boxes.

        Args:
            image: the image as a data URL.
            name: label to detect.
        """
        found: list[dict[str, Any]] = (await self._json("POST", "/v1/detect", {"image_url": image, "object": name}))[
            "objects"
        ]
        return found

    async def ask(self, image: str, question: str) -> str:
        """Return the model's answer to a question about an image. The image is a data URL."""
        answer: str = (await self._json("POST", "/v1/query", {"image_url": image, "question": question}))["answer"]
        return answer

    async def events(self, **filters: str) -> list[dict[str, Any]]:
        """Return stored events, newest first.

        The filters are stream, rule, label, zone, since, q (words to search) and limit.
        """
        asked = "&".join(f"{key}={quote(value, safe='')}" for key, value in filters.items() if value)
        found: list[dict[str, Any]] = (await self._json("GET", f"/events?{asked}"))["events"]
        return found

    async def snapshot(self, event: str) -> bytes:
        """Return the snapshot of an event as JPEG."""
        return await self._request("GET", f"/events/{quote(event, safe='')}/snapshot.jpg")

    def clip_url(self, event: str) -> str:
        """Return the URL of an event's video clip. The URL does not contain the token."""
        return f"{self._url}/events/{quote(event, safe='')}/clip.mp4"

    async def config_changes(self, text: str) -> list[str]:
        """Return the changes that a new configuration file would cause, one line per change. Nothing is applied."""
        answer = await self._request("POST", "/config/diff", text=text)
        changes: list[str] = json.loads(answer)["changes"]
        return changes

    async def search(self, filters: Mapping[str, str], progress: Callable[[int, int], None]) -> dict[str, Any]:
        """Search the stored events of the server for a text. The server's model compares the text with the snapshots.

        Return a dict with `events` (best match first) and `away` (names of unreachable machines).

        Args:
            filters: filters for the events. `q` is the text to search for.
            progress: progress callback, which receives the number of processed snapshots and the total number.

        Raises:
            ApiError: if the search fails or the connection is closed.
        """
        headers = {"Accept": "text/event-stream"}
        async with self._answer("GET", f"/events/search?{urlencode(filters)}", headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    message: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "events" in message:
                        return message
                    if "error" in message:
                        raise ApiError(message["error"]["message"])
                    progress(message["done"], message["of"])
        raise ApiError(f"{self._url} closed the connection during the search; try again")

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(await self._request(method, path, body))

    async def _request(self, method: str, path: str, body: Any = None, *, text: str | None = None) -> bytes:
        given: dict[str, Any] = {} if body is None else {"json": body}
        if text is not None:
            given = {"content": text.encode(), "headers": {"Content-Type": "application/yaml"}}
        async with asyncio.timeout(_ANSWER_S), self._answer(method, path, **given) as response:
            return await _read(response)

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **given: Any) -> AsyncIterator[httpx.Response]:
        """Send a request. Yield the response before its body is read. Raise an ApiError if the request failed."""
        assert self._session is not None
        try:
            async with self._session.stream(method, self._url + path, **given) as response:
                if response.is_success:
                    yield response
                    return
                data = await _read(response)
        except (TimeoutError, httpx.HTTPError) as error:
            raise ApiError(
                f"Saccade does not respond at {self._url}: start it with --http ({type(error).__name__})"
            ) from None
        if response.status_code == 404 and path.startswith(("/events?", "/events/search?")):
            raise ApiError("this Saccade stores no events: restart it with --store DIR and rules")
        raise ApiError(_reason(data) or f"{response.status_code} {response.reason_phrase}")


async def _read(response: httpx.Response) -> bytes:
    """Read the body of a response. A body over the size limit is truncated."""
    data = b""
    async for part in response.aiter_bytes():
        data += part
        if len(data) > _MAX_BYTES:
            break
    return data


def data_url(jpeg: bytes) -> str:
    """Convert the content of a JPEG file to a data URL."""
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _reason(data: bytes) -> str:
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""


def summary_of(stream: dict[str, Any]) -> dict[str, Any]:
    """Select the fields of a stream's state that an AI assistant (MCP client) needs."""
    keys: Sequence[str] = ("name", "state", "ok", "reason", "detect", "point", "query", "fps", "objects")
    return {key: stream.get(key) for key in keys}
