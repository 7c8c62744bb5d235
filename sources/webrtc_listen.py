"""`webrtc:8081` as a source: an endpoint of one's own, and the video of whoever publishes to it, one peer at a time.

    webrtc:8081                                    http://127.0.0.1:8081/whip
    webrtc://0.0.0.0:8081/door?token=sesame        http://…:8081/door, for those who know the token
    …?origin=https://example.org                   lets that page connect as well; may be repeated
    …?ice=stun:stun.example.org:3478               a STUN server; may be repeated. None by default

OBS, GStreamer, FFmpeg (`-f whip`) and browsers publish to it. Knows nothing of models, results or sinks.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from aiohttp import web
from aiortc import RTCIceServer

from sources.base import SourceError, SourceInfo
from sources.frame import Frame
from sources.webrtc import CLOCK_RATE, WebRtcSource, live_info
from sources.webrtc_server import SILENCE_S, WebRtcServer

log = logging.getLogger(__name__)

DEFAULT_PORT = 8081
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOOP_S = 10.0  # for anything asked of the event loop

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ListenTarget:
    """Where to listen and whom to let in, as a user typed it."""

    host: str
    port: int
    path: str
    token: str | None
    origins: tuple[str, ...]
    ice: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ListenTarget:
        """Read `webrtc:PORT` or `webrtc://HOST:PORT/PATH?token=…`; every part may be left out.

        Raises:
            SourceError: if it is neither, or would let everybody on the network in.
        """
        rest = text.removeprefix("webrtc:")
        parts = urlsplit(rest if rest.startswith("//") else f"//127.0.0.1:{rest}")
        try:
            port = DEFAULT_PORT if parts.port is None else parts.port
            query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise SourceError("webrtc: give a port, as webrtc:8081, or webrtc://HOST:PORT/PATH?token=…") from None
        if unknown := sorted(query.keys() - {"token", "origin", "ice"}):
            raise SourceError(f"webrtc: no such setting as '{unknown[0]}'; there are token, origin and ice")
        if parts.username is not None:
            raise SourceError("webrtc: a token is given as ?token=…, not before an @")
        host = parts.hostname or "127.0.0.1"
        token = query.get("token", [None])[0] or None
        if token is None and host not in _LOOPBACK:
            raise SourceError(f"webrtc: {host} can be reached by others, so a token is needed: ?token=…")
        path = parts.path.rstrip("/") or "/whip"
        return cls(host, port, path, token, tuple(query.get("origin", ())), tuple(query.get("ice", ())))


class WebRtcListener:
    """A source that waits for publishers. A new one takes the place of the old, whose tab may have died unheard.

    It never ends by itself. `Frame.pts` and `Frame.index` go on from one publisher to the next, the time between them
    included. The event loop runs in a thread of its own, which ends with `close`.

    Raises:
        SourceError: if the target is not understood or its port cannot be had.
    """

    def __init__(
        self,
        target: str,
        *,
        stream: str | None = None,
        vid_stride: int = 1,
        media_hosts: Sequence[str] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        if vid_stride < 1:
            raise SourceError(f"vid_stride must be 1 or more, not {vid_stride}")
        self._target = ListenTarget.parse(target)
        self._name = stream if stream is not None else "webrtc"
        self._sources: queue.SimpleQueue[WebRtcSource | None] = queue.SimpleQueue()
        self._ended = False  # belongs to the thread that iterates
        self._lock = threading.Lock()  # over the three below
        self._current: WebRtcSource | None = None
        self._lost = 0
        self._closed = False
        try:
            self._server = WebRtcServer(
                self._sources.put,
                token=self._target.token,
                origins=self._target.origins,
                ice_servers=[RTCIceServer(url) for url in self._target.ice],
                media_hosts=media_hosts,
                max_peers=1,
                replace=True,
                silence_s=silence_s,
                vid_stride=vid_stride,
            )
        except ValueError as error:
            raise SourceError(f"webrtc: {error}") from None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="webrtc", daemon=True)
        self._thread.start()
        try:
            self._runner, self._port = self._on_loop(self._open())
        except OSError as error:
            self._end_loop()
            raise SourceError(
                f"webrtc: cannot listen on {self._target.host}:{self._target.port}: {error.strerror}"
            ) from error
        log.info("webrtc: publish to %s", self.url)

    @property
    def url(self) -> str:
        """Where publishers POST their offers (WHIP)."""
        host = f"[{self._target.host}]" if ":" in self._target.host else self._target.host
        return f"http://{host}:{self._port}{self._target.path}"

    @property
    def name(self) -> str:
        """Name of the stream, as in `Frame.stream`."""
        return self._name

    @property
    def info(self) -> SourceInfo:
        """What is known by now; codec "unknown" and size 0×0 before the first picture."""
        with self._lock:
            known = self._current.info if self._current is not None else live_info("", "unknown", 0, 0)
        return replace(known, url=self.url)

    @property
    def corrupt_packets(self) -> int:
        """Pictures of all publishers that could not be decoded because a part of them was lost."""
        with self._lock:
            return self._lost + (self._current.corrupt_packets if self._current is not None else 0)

    def __iter__(self) -> Iterator[Frame]:
        """Yield the newest picture each time, of one publisher after the other."""
        last: Frame | None = None
        while (source := self._next_source()) is not None:
            shift: tuple[int, int] | None = None
            for frame in source:
                if shift is None:
                    shift = _shift_after(last, frame)
                last = replace(frame, stream=self._name, pts=frame.pts + shift[0], index=frame.index + shift[1])
                yield last

    def close(self) -> None:
        """End the iteration, let the publisher go and give the port back. Callable from any thread, repeatedly."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._on_loop(self._runner.cleanup())
        self._sources.put(None)
        self._end_loop()

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the source."""
        self.close()

    def _next_source(self) -> WebRtcSource | None:
        if self._ended:
            return None
        source = self._sources.get()
        if source is None:
            self._ended = True  # for an iteration after this one too
            return None
        with self._lock:
            self._lost += self._current.corrupt_packets if self._current is not None else 0
            self._current = source
        return source

    async def _open(self) -> tuple[web.AppRunner, int]:
        application = web.Application()
        application.add_routes(self._server.routes(self._target.path, f"{self._target.path}/offer"))

        async def let_go(_: web.Application) -> None:
            await self._server.close()

        application.on_shutdown.append(let_go)
        # No access log: it would name every session's secret.
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._target.host, self._target.port).start()
        except BaseException:
            await runner.cleanup()
            raise
        return runner, runner.addresses[0][1]

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LOOP_S)

    def _end_loop(self) -> None:
        self._on_loop(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    """End what still runs on this loop: aioice notices only 20 ms later that a connection was closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


def _shift_after(last: Frame | None, first: Frame) -> tuple[int, int]:
    """What to add to pts and index of a publisher, so that they go on from the last picture of the one before."""
    if last is None:
        return 0, 0
    between = max(1, round((first.decoded_at - last.decoded_at) * CLOCK_RATE))
    return last.pts + between - first.pts, last.index + 1 - first.index
