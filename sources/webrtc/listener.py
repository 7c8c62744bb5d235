"""Source that receives video over WebRTC: a WHIP endpoint such as `webrtc:8081`, for one publisher at a time.

The address of the source selects the endpoint:

    webrtc:8081                                    http://127.0.0.1:8081/whip
    webrtc://0.0.0.0:8081/door?token=sesame        http://…:8081/door, for clients with the token
    …?origin=https://example.org                   allows this web page to connect; may be repeated
    …?token_file=FILE                              token in a file, or in the environment as SACCADE_TOKEN
    …?cert=FILE&key=FILE                           https with this certificate
    …?ice=stun:stun.example.org:3478               STUN or TURN server; may be repeated; none by default
"""

from __future__ import annotations

import logging
import queue
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, urlsplit

from saccade.addresses import with_plain_zone
from saccade.sources.errors import LiveError, Reason, SourceError
from saccade.sources.gpu import HwAccel
from saccade.sources.live.packets import Taps
from saccade.sources.live.reconnect import Link
from saccade.sources.live.source import LiveSource
from saccade.sources.webrtc.signaling import SILENCE_S, ice_server
from saccade.sources.webrtc.source import WebRtcConnection, WebRtcSource
from saccade.sources.webrtc.whip_server import WebRtcServer
from saccade.web.auth import HttpAuth
from saccade.web.guard import Guard
from saccade.web.server import AppServer
from saccade.web.tls import optional_context
from saccade.web.tokens import find_token, is_loopback

log = logging.getLogger(__name__)

DEFAULT_PORT = 8081
_OPTIONS = ("token", "token_file", "origin", "ice", "cert", "key")


@dataclass(slots=True, frozen=True)
class ListenTarget:
    """Listening address and access rules of a WHIP endpoint, parsed from an address such as `webrtc:8081`."""

    host: str
    port: int
    path: str
    token: str | None
    origins: tuple[str, ...]
    ice: tuple[str, ...]
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, text: str) -> ListenTarget:
        """Parse `webrtc:PORT` or `webrtc://HOST:PORT/PATH?token=…`. All parts are optional.

        Raises:
            SourceError: if the address is malformed, or would accept any client on the network.
        """
        rest = with_plain_zone(text.removeprefix("webrtc:"))
        parts = urlsplit(rest if rest.startswith("//") else f"//127.0.0.1:{rest}")
        try:
            port = DEFAULT_PORT if parts.port is None else parts.port
            query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise SourceError("webrtc: invalid address; write webrtc:8081 or webrtc://HOST:PORT/PATH?token=…") from None
        if unknown := sorted(query.keys() - set(_OPTIONS)):
            raise SourceError(f"webrtc: unknown option '{unknown[0]}'; use {', '.join(_OPTIONS)}")
        if parts.username is not None:
            raise SourceError("webrtc: write the token as ?token=…; a token before @ is not supported")
        host = parts.hostname or "127.0.0.1"
        given = {name: values[0] or None for name, values in query.items()}
        try:
            token = find_token(given.get("token"), given.get("token_file"), host)
            tls = optional_context(given.get("cert"), given.get("key"))
        except ValueError as error:
            raise SourceError(f"webrtc: {error}") from None
        if token is None and not is_loopback(host):
            raise SourceError(f"webrtc: {host} is reachable from the network: add a token with ?token=…")
        path = parts.path.rstrip("/") or "/whip"
        return cls(host, port, path, token, tuple(query.get("origin", ())), tuple(query.get("ice", ())), tls)


class _PublisherLink(Link):
    """Connection status of a WebRTC publisher. Saccade does not retry, because the publisher opens the connection."""

    def silent(self, now: float) -> bool:
        super().silent(now)
        return False

    def failed(
        self, reason: Reason, message: str | None = None, *, refused: bool = False, now: float | None = None
    ) -> float:
        super().failed(reason, message, refused=refused, now=now)
        return 0.0


class WebRtcListener(LiveSource):
    """A source that waits for WebRTC publishers (WHIP). A new publisher replaces the current one.

    The source ends only when closed. After a new publisher has connected, timestamps continue to increase.

    Args:
        target: the address that the user typed.
        stream: name of the stream; "webrtc" if None.
        vid_stride: yield every `vid_stride`-th frame.
        hwaccel: for H.264, "auto" to use a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.
        retry: False to raise `LiveError` when the first publisher has left.
        media_hosts, silence_s: see `Signaling`.

    Raises:
        SourceError: if the target is malformed or its port cannot be bound.
    """

    def __init__(
        self,
        target: str,
        *,
        stream: str | None = None,
        vid_stride: int = 1,
        hwaccel: HwAccel = "none",
        retry: bool = True,
        media_hosts: Sequence[str] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        name = stream if stream is not None else "webrtc"
        super().__init__(
            target, self._next_connection, stream=name, vid_stride=vid_stride, retry=retry, link=_PublisherLink()
        )
        self._target = ListenTarget.parse(target)
        self._sources: queue.SimpleQueue[WebRtcSource | None] = queue.SimpleQueue()
        try:
            self._server = WebRtcServer(
                self._sources.put,
                ice_servers=[ice_server(text) for text in self._target.ice],
                media_hosts=media_hosts,
                max_peers=1,
                replace=True,
                silence_s=silence_s,
                hwaccel=hwaccel,
            )
        except ValueError as error:
            raise SourceError(f"webrtc: {error}") from None
        at = self._target
        routes = self._server.routes(at.path, f"{at.path}/offer")
        guarded = Guard(routes, HttpAuth(at.token, at.origins))
        try:
            self._web = AppServer(guarded, at.host, at.port, "webrtc", at.tls, on_cleanup=[self._server.close])
        except OSError as error:
            place = f"{self._target.host}:{self._target.port}"
            raise SourceError(f"webrtc: cannot listen on {place}: {error.strerror}") from error
        self.url = f"{self._web.url}{self._target.path}"
        """URL to which publishers POST their SDP offers (WHIP)."""
        self._info = replace(self._info, url=self.url)
        log.info("stream %s: waiting for a WebRTC publisher at %s", name, self.url)

    def close(self) -> None:
        """End the iteration over frames, disconnect the publisher and stop listening. Thread-safe."""
        super().close()
        self._sources.put(None)
        self._web.close()

    def _next_connection(self, closed: threading.Event, gpu: int | None, taps: Taps) -> WebRtcConnection:
        source = None if closed.is_set() else self._sources.get()
        if source is None:
            raise LiveError("connection failed", "closed")
        source.connection.final = False
        source.connection.taps = taps
        return source.connection
