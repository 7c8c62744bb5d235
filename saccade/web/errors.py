"""What a server answers where it cannot do what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException


class HttpError(HTTPException):
    """An error response; raised by handlers, sent by the `Guard`.

    Args:
        status: the HTTP status.
        line: the reason, half a line. What a client sent may be repeated in it: a lone surrogate becomes an escape.
        headers: of the response.
    """

    def __init__(self, status: int, line: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        line = f"{status}: {HTTPStatus(status).phrase}" if line is None else line
        super().__init__(status, line.encode(errors="backslashreplace").decode(), headers)
