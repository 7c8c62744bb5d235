"""Servers of video over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from http.server import BaseHTTPRequestHandler

import av

from tests.support.clips import numbered_image
from tests.support.http_server import serving

FRAMES = 20


@contextmanager
def http(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers every GET so; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # the client has gone
                answer(self)

    with serving(Handler) as port:
        yield f"http://127.0.0.1:{port}"


def jpeg(number: int) -> bytes:
    coder = av.CodecContext.create("mjpeg", "w")
    coder.width, coder.height, coder.pix_fmt = 160, 120, "yuvj420p"
    coder.time_base = Fraction(1, 25)
    frame = av.VideoFrame.from_ndarray(numbered_image(number, 160, 120), format="rgb24")
    return b"".join(bytes(packet) for packet in [*coder.encode(frame.reformat(format="yuvj420p")), *coder.encode(None)])


def mjpeg(request: BaseHTTPRequestHandler) -> None:
    """An old webcam: one JPEG after another, then it hangs up."""
    request.send_response(200)
    request.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
    request.end_headers()
    for number in range(FRAMES):
        data = jpeg(number)
        head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
        request.wfile.write(head.encode() + data + b"\r\n")
        time.sleep(0.02)
