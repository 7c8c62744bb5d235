"""Serves files: the pages that ship with the project, with headers that permit them only what they need; and videos."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from saccade.pipeline.asset_files import PAGES

FILES = {"/": PAGES / "index.html"} | {
    f"/{path.relative_to(PAGES).as_posix()}": path
    for path in sorted(PAGES.rglob("*"))
    if path.suffix in (".css", ".js", ".json")
}
"""The files of the page by their paths on the server."""

_CHUNK_BYTES = 256 * 1024
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "camera=(self), microphone=()",
    "Referrer-Policy": "no-referrer",  # the address may hold the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def file_route(place: str, path: Path) -> web.RouteDef:
    """A route that serves one file of a page."""

    async def serve(request: web.Request) -> web.Response:
        return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8", headers=_HEADERS)

    return web.get(place, serve)


async def send_file(request: web.Request, path: Path, headers: Mapping[str, str]) -> web.StreamResponse:
    """Serve a file, or the range of it that is asked for.

    With `If-Range` a range is only of the version of the file that the client has a part of: its ETag, or its time of
    change. aiohttp up to 3.14 ignores an ETag there, and would mix two versions.
    """
    condition = request.headers.get("If-Range")
    if condition is None or "Range" not in request.headers or request.method != "GET":
        return web.FileResponse(path, headers=headers)
    status = await asyncio.to_thread(path.stat)
    response = web.StreamResponse(headers={**headers, "Accept-Ranges": "bytes"})
    response.etag, response.last_modified = f"{status.st_mtime_ns:x}-{status.st_size:x}", status.st_mtime
    # Compared as they are written: a weak ETag, or a later time, may stand for other bytes.
    if condition in (response.headers["ETag"], response.headers["Last-Modified"]):
        return web.FileResponse(path, headers=headers)
    response.content_length = status.st_size
    await response.prepare(request)
    with await asyncio.to_thread(path.open, "rb") as file:
        while data := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            await response.write(data)
    await response.write_eof()
    return response
