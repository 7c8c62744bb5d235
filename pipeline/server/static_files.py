"""Serves the pages that ship with the project, with headers that permit them only what they need."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from saccade.pipeline.asset_files import PAGES

FILES = {"/": PAGES / "index.html"} | {
    f"/{path.relative_to(PAGES).as_posix()}": path
    for path in sorted(PAGES.rglob("*"))
    if path.suffix in (".css", ".js", ".json")
}
"""The files of the page by their paths on the server."""

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
