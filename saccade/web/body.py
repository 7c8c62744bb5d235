"""Reads HTTP request bodies, with limits on size and time."""

from __future__ import annotations

import asyncio
import json
import zlib
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request

from saccade.web.errors import HttpError

_BODY_S = 5.0  # seconds within which a client must send its body


def content_type(request: Request) -> str:
    """Return the media type of a request's body without parameters; "" if the request has no Content-Type."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def require_type(request: Request, kind: str, what: str) -> None:
    """Raise HttpError 415 if the media type of a request's body is not `kind`.

    Args:
        request: the request.
        kind: required media type, such as "application/json".
        what: description of the body for the error, such as "an offer".
    """
    if content_type(request) != kind:
        raise HttpError(415, f"{what} must be of type {kind}")


async def read_bytes(request: Request, limit: int, what: str) -> bytes:
    """Read the body of an HTTP request and decompress it.

    Args:
        request: the request, whose body has not been read yet.
        limit: maximum size in bytes, before and after decompression.
        what: description of the body for error messages, such as "an offer".

    Raises:
        HttpError: 413 if the body is too large; 408 if it takes longer than 5 s; 400 if the client disconnects or the
            compression is unsupported.
    """
    too_much = HttpError(413, f"{what} is too large: at most {limit} bytes are allowed")
    if int(request.headers.get("Content-Length", 0)) > limit:  # a number, as h11 has checked
        raise too_much
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S), aclosing(request.stream()) as parts:
            async for part in parts:
                body += part
                if len(body) > limit:
                    raise too_much
    except TimeoutError:
        raise HttpError(408, f"{what} was not received within {_BODY_S:g} s") from None
    except ClientDisconnect:  # nobody reads this, but it is no error of the server
        raise HttpError(400, f"{what} was not received completely") from None
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        try:
            body = _decompressed(body, encoding, limit)
        except (zlib.error, ValueError):
            raise HttpError(400, f"{what} does not match its Content-Encoding header") from None
        if len(body) > limit:
            raise too_much
    return bytes(body)


def _decompressed(body: bytearray, encoding: str, limit: int) -> bytearray:
    """Decompress a request's body. Stop after `limit` + 1 bytes."""
    if encoding not in ("gzip", "deflate"):
        raise ValueError
    unpacking = zlib.decompressobj(wbits=47)  # gzip or zlib, by its header
    unpacked = unpacking.decompress(body, limit + 1)
    if not unpacking.eof and len(unpacked) <= limit:
        raise ValueError
    return bytearray(unpacked)


async def read_text(request: Request, limit: int, what: str) -> str:
    """Read the body of a request as UTF-8 text.

    Raises:
        HttpError: 400 if the body is not UTF-8; otherwise as in `read_bytes`.
    """
    try:
        return (await read_bytes(request, limit, what)).decode()
    except UnicodeDecodeError:
        raise HttpError(400, f"{what} is not UTF-8 text") from None


def parse_json(text: str) -> Any:
    """Parse a client's JSON text.

    Raises:
        ValueError: if the text is not JSON, or contains a lone surrogate.
        RecursionError: if the text is nested too deeply.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value
