"""HTTP response with a file that may change while it is sent."""

from __future__ import annotations

import os
from typing import BinaryIO

from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send


class OpenFileResponse(FileResponse):
    """HTTP response with the content of an open file. Range requests are supported.

    The client receives the content that the file had when it was opened, even if the file is then replaced, deleted or
    extended. Clips are replaced when their event ends, and recordings grow. Starlette's `FileResponse` reads the size
    before it opens the file, so it would break off such a response.

    Args:
        file: the file, opened for reading. The response closes it.
        media_type: media type of the file, such as video/mp4.
        cache: value of the header `Cache-Control`.
    """

    def __init__(self, file: BinaryIO, media_type: str, cache: str) -> None:
        number = file.fileno()
        headers = {"Cache-Control": cache}
        super().__init__(f"/dev/fd/{number}", headers=headers, media_type=media_type, stat_result=os.fstat(number))
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, then close the file."""
        left = 0

        async def send_no_more(message: Message) -> None:
            nonlocal left
            if message["type"] == "http.response.start":
                left = int(Headers(raw=list(message["headers"]))["content-length"])
            elif message["type"] == "http.response.body":
                body = message["body"][:left]
                left -= len(body)
                message = {**message, "body": body}
            await send(message)

        with self._file:
            await super().__call__(scope, receive, send_no_more)
