"""The files of the web console, served with restrictive security headers."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from saccade.pipeline.api.access import Role
from saccade.pipeline.asset_files import DEMO_CLIP, PAGES

FILES = {"/": PAGES / "index.html"} | {
    f"/{path.relative_to(PAGES).as_posix()}": path
    for path in sorted(PAGES.rglob("*"))
    if path.suffix in (".css", ".js", ".json")
}
"""The files of the page, by path on the server."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "camera=(self), microphone=()",
    "Referrer-Policy": "no-referrer",  # the URL can contain the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class FileRoute(Route):
    """A route that serves one file of the web console without a token. Only requests to the HTTP API need the token.

    Args:
        place: path in the URL.
        path: path of the file.
    """

    role: Role = "anyone"

    def __init__(self, place: str, path: Path) -> None:
        async def send(request: Request) -> Response:
            if path.suffix == ".mp4":
                return FileResponse(path)
            return Response(path.read_bytes(), media_type=f"{_TYPES[path.suffix]}; charset=utf-8", headers=_HEADERS)

        super().__init__(place, send)


PAGE = [FileRoute(place, path) for place, path in FILES.items()]
CLIP = FileRoute("/clip.mp4", DEMO_CLIP)
