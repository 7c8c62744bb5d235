"""Passes HTTP requests on to a worker and its answers back, as they come. Knows no streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from saccade.sources.http.auth import refusal
from yarl import URL

from saccade.pipeline.workers.auth import front_headers

ASK_S = 5.0  # for a worker to answer what the front itself asks
_FORWARD_S = 120.0  # for the answer to a client's request to begin: a model may have to think
_SENT_ON = ("Content-Type", "Accept", "Range", "If-None-Match", "If-Modified-Since", "If-Range")
_SENT_BACK = (
    *("Content-Type", "Location", "Link", "ETag", "Last-Modified", "Accept-Ranges", "Content-Range", "Cache-Control"),
    *("Allow", "Retry-After"),
)
_SENT_BACK_TOO = "X-"
_WHOLE = 1 << 20  # bytes of an answer that is read before it is passed on; clips are longer


class Forwarder:
    """Asks workers. Its hooks belong to the application that serves the requests.

    Args:
        secret: that workers know the front by.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def start(self, application: web.Application) -> None:
        """Hook for `on_startup`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ASK_S, sock_read=_FORWARD_S)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)

    async def close(self, application: web.Application) -> None:
        """Hook for `on_cleanup`."""
        if self._session is not None:
            await self._session.close()

    async def forward(self, request: web.Request, worker: str | None) -> web.StreamResponse:
        """Have a worker answer a request.

        Args:
            request: with the authentication done.
            worker: the address of its HTTP API; None if there is none at the moment.

        Raises:
            HTTPServiceUnavailable: if it cannot.
        """
        if worker is None or self._session is None:
            raise unavailable()
        query = [(key, value) for key, value in request.query.items() if key != "token"]
        url = URL(f"{worker}{request.rel_url.raw_path}", encoded=True).with_query(query)
        headers = CIMultiDict({key: request.headers[key] for key in _SENT_ON if key in request.headers})
        headers.update(front_headers(self._secret, request))
        body = request.content if request.can_read_body else None
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                kept = CIMultiDict(
                    (key, value)
                    for key, value in answer.headers.items()
                    if key in _SENT_BACK or key.startswith(_SENT_BACK_TOO)
                )
                size = answer.content_length
                whole = request.method != "HEAD" and answer.content_type != "text/event-stream"
                if whole and (size is None or size <= _WHOLE):
                    return web.Response(status=answer.status, headers=kept, body=await answer.read())
                response = web.StreamResponse(status=answer.status, headers=kept)
                response.content_length = size
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError):
            if response is None or not response.prepared:
                raise unavailable() from None
            if request.transport is not None:  # another answer would be taken for the rest of this one
                request.transport.abort()
            return response

    async def get(self, request: web.Request, worker: str | None, path: str) -> Any:
        """What a worker answers to a GET of JSON, on behalf of the client of `request`; None if it does not."""
        data = await self.get_bytes(worker, path, front_headers(self._secret, request))
        return None if data is None else json.loads(data)

    async def get_bytes(self, worker: str | None, path: str, headers: dict[str, str]) -> bytes | None:
        """The body of a worker's answer to a GET; None if there is none."""
        found = await self._get(worker, path, headers)
        return None if found is None or found[0] != 200 else found[1]

    async def ask(self, request: web.Request, url: str, path: str) -> tuple[int, bytes] | None:
        """Status and body of the answer to a GET, on behalf of the client of `request`; None if there is none."""
        return await self._get(url, path, front_headers(self._secret, request))

    async def _get(self, url: str | None, path: str, headers: dict[str, str]) -> tuple[int, bytes] | None:
        if url is None or self._session is None:
            return None
        try:
            asked = URL(f"{url}{path}", encoded=True)
            async with asyncio.timeout(ASK_S), self._session.get(asked, headers=headers) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            return None


def unavailable() -> web.HTTPException:
    """The answer where there is no worker for a request."""
    return refusal(web.HTTPServiceUnavailable, "its worker is being started; try again in some seconds")
