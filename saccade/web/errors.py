"""HTTP errors that request handlers raise."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException


class HttpError(HTTPException):
    """An HTTP error response. A handler raises it, and `Guard` sends it to the client.

    Args:
        status: HTTP status.
        line: error message in one line. It may contain client input; lone surrogates are escaped.
        headers: headers of the response.
    """

    def __init__(self, status: int, line: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        line = f"{status}: {HTTPStatus(status).phrase}" if line is None else line
        super().__init__(status, line.encode(errors="backslashreplace").decode(), headers)
