"""The sink `whep:8082`: serves the annotated video of every stream to browsers and players.

    whep:8082                                      open http://127.0.0.1:8082/ in a browser
    whep://0.0.0.0:8082?token=sesame               clients need this token
    …?token_file=FILE                              clients need the token in this file
    …?cert=FILE&key=FILE                           serve HTTPS with this certificate
    …?origin=https://example.org                   allow this web origin too; can be repeated
    …?ice=turn:USER:PASSWORD@HOST:3478             use this STUN or TURN server; can be repeated

The token can also be in the environment variable SACCADE_TOKEN. The web page lists the streams and shows one of them.
Players use http://HOST:PORT/whep/STREAM.
"""

from __future__ import annotations

import ssl
from typing import Annotated, Any, ClassVar

from saccade.engine.results import Result
from saccade.pipeline.api import live_mp4, static_files
from saccade.pipeline.api.http_server import HttpServer
from saccade.pipeline.api.routes import Routes, the
from saccade.pipeline.api.whep import WhepServer
from saccade.pipeline.api.whep import routes as whep_routes
from saccade.pipeline.errors import ConfigError
from saccade.sinks import Latency, SinkError
from saccade.sinks.base import SourceHints
from saccade.sinks.urls import Address, Options
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources import Frame
from saccade.sources.webrtc.signaling import ice_server
from saccade.web.tls import optional_context
from saccade.web.tokens import find_token

DEFAULT_PORT = 8082
_MODEL: dict[str, Any] = {
    "model": None,
    "device": None,
    "classes": None,
    "skills": [],
    "publish": False,
    "prompts": None,
    "colors": {},
}


class ViewerSink:
    """A sink that serves the annotated video of any number of streams to viewers.

    The video of a stream is annotated and encoded only while the stream has viewers.

    Attributes:
        url: URL of the web page.

    Args:
        host: address to listen on.
        port: port to listen on; 0 for any free port.
        token: token that viewers need; None for no authentication.
        origins: web origins that can connect, in addition to this server.
        tls: TLS context with the server's certificate; None for no encryption.
        ice: addresses of STUN and TURN servers, see `ice_server`.

    Raises:
        SinkError: if the address is not available, a public address has no token, or an ICE server is malformed.
    """

    shared: ClassVar[bool] = True

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        token: str | None = None,
        origins: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
        ice: tuple[str, ...] = (),
    ) -> None:
        self._videos = BroadcastSink()
        try:
            whep = WhepServer(self._videos, ice_servers=[ice_server(text) for text in ice])
            self._server = HttpServer(
                [*static_files.PAGE, _routes, whep_routes, live_mp4.routes],
                {BroadcastSink: self._videos, WhepServer: whep},
                host,
                port,
                token,
                tls=tls,
                origins=origins,
                on_cleanup=[whep.close],
            )
        except (ConfigError, ValueError) as error:
            raise SinkError(f"cannot open the sink whep: {error}") from None
        self.url = f"{self._server.url}/"

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Send an annotated frame to all viewers of its stream.

        Raises:
            SinkError: if the frame cannot be encoded.
        """
        self._videos.write(frame, result, latency)

    def end(self, stream: str) -> None:
        """Disconnect all viewers of a stream that has ended."""
        self._videos.end(stream)

    def close(self) -> None:
        """Disconnect all viewers and close the HTTP port. A second call does nothing."""
        self._videos.close()
        self._server.close()


def open_whep(target: str, hints: SourceHints | None = None) -> ViewerSink:
    """Open the sink for the address `whep:PORT` or `whep://HOST:PORT?token=…`. `hints` is not used.

    Raises:
        SinkError: if the address is invalid, or the sink cannot be opened.
    """
    place, _, query = target.removeprefix("whep:").partition("?")
    if not place.startswith("//"):
        place = f"//127.0.0.1:{place}" if place else "//127.0.0.1"
    address = Address.parse(f"whep:{place}", {"whep": DEFAULT_PORT}, "whep:8082 or whep://HOST:PORT?token=…")
    options = Options(query, address.shown)
    given, token_file, origins = options.text("token"), options.text("token_file"), tuple(options.texts("origin"))
    cert, key, ice = options.text("cert"), options.text("key"), tuple(options.texts("ice"))
    options.reject_unknown()
    if address.user is not None or address.path:
        raise SinkError(
            f"{address.shown}: a user name and a path are not allowed; use only host, port and options such as ?token=…"
        )
    try:
        token, tls = find_token(given or None, token_file or None, address.host), optional_context(cert, key)
    except ValueError as error:
        raise SinkError(f"{address.shown}: {error}") from None
    return ViewerSink(address.host, address.port, token, origins, tls, ice)


_routes = Routes("sink")


@_routes.get("/streams", role="viewer")
async def _list(videos: Annotated[BroadcastSink, the(BroadcastSink)]) -> dict[str, Any]:
    return {"streams": [{"name": name, "state": "live", "ok": True} for name in videos.streams]}


@_routes.get("/model", role="viewer")
async def _model() -> dict[str, Any]:
    """Return an empty description of the model, so that the web page shows only video."""
    return _MODEL
