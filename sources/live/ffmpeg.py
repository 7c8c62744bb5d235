"""Live streams that FFmpeg opens: HLS, RTMP, MJPEG over HTTP, MPEG-TS over UDP, SRT, webcams, RTSP with rare codecs.

FFmpeg cannot be interrupted from outside, so it gets a thread of its own, which ends with its next packet or by its
own timeout, 4 s at most after `close`. Knows nothing of states or of reconnecting.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import av
import av.error
from av.container import InputContainer
from av.video.stream import VideoStream

from saccade.sources.errors import LiveError, SourceError, StreamEndedError
from saccade.sources.gpu import HwAccel, gpu_decoding, primary_context, running
from saccade.sources.live.clock import LIVE_BASE
from saccade.sources.live.connection import LiveFrame, StreamStats
from saccade.sources.live.decoder import set_live
from saccade.sources.live.pacer import Pacer
from saccade.sources.live.packets import PacketListener, PacketTap
from saccade.sources.live.reconnect import SILENCE_S
from saccade.sources.urls import redact
from saccade.sources.video_stream import NoVideoError, choose_video

_OPEN_S = 10.0  # HLS requests a playlist, a variant and a segment first
_SEGMENTED = ("hls", "dash")  # frames come in one burst a segment
_READY = 2  # frames decoded ahead; a live stream drops the older
_WAKE_S = 0.1
# Half a second of probing; FFmpeg's own 5 s are for files whose sound track begins late. Not `fflags=nobuffer`, which
# throws away what was probed: a recording would begin in its middle.
_PROBE = {"analyzeduration": "500000", "probesize": "500000"}


@dataclass(slots=True, frozen=True)
class FfmpegInput:
    """What FFmpeg opens, and how.

    Attributes:
        target: address or device.
        format: FFmpeg's name of the format, where it cannot be detected.
        options: its options.
    """

    target: str
    format: str | None = None
    options: Mapping[str, str] = field(default_factory=lambda: dict(_PROBE))

    def __repr__(self) -> str:
        return f"FfmpegInput({redact(self.target)!r})"  # a traceback or log must not show the password

    @classmethod
    def of_url(cls, url: str, *, follow_redirects: bool = True) -> FfmpegInput:
        """How to open an address that is not RTSP."""
        options = _PROBE if follow_redirects else {**_PROBE, "max_redirects": "0"}
        return cls(url, options=options)

    @classmethod
    def of_rtsp(cls, url: str, transport: str) -> FfmpegInput:
        """How to open RTSP with another codec than H.264 and H.265: in 0.08 s instead of 1.5 to 2."""
        options = {
            "rtsp_transport": {"auto": "tcp", "multicast": "udp_multicast"}.get(transport, transport),
            "fflags": "nobuffer",
            "analyzeduration": "0",
            "probesize": "32",
        }
        return cls(url, options=options)

    @classmethod
    def of_camera(cls, number: int) -> FfmpegInput:
        """How to open a webcam.

        Raises:
            SourceError: if this build of FFmpeg cannot.
        """
        form, target = ("avfoundation", str(number)) if sys.platform == "darwin" else ("v4l2", f"/dev/video{number}")
        if form not in av.formats_available:
            raise SourceError(
                f"camera {number}: FFmpeg as it comes with PyAV has no webcams here (no {form}); serve it over RTSP"
            )
        return cls(target, form)


class FfmpegConnection:
    """One connection through FFmpeg, open from construction on.

    Args:
        address: what to open.
        closed: ends every wait when set.
        hwaccel: whether to decode on the GPU.
        gpu: as in `gpu_decoding`.

    Raises:
        LiveError: if it cannot be opened.
        SourceError: if this build of FFmpeg does not know the protocol, or the GPU is insisted on and cannot decode.
    """

    def __init__(
        self, address: FfmpegInput, closed: threading.Event, *, hwaccel: HwAccel = "none", gpu: int | None = None
    ) -> None:
        self._address = address
        self._closed = closed
        self._handle = gpu_decoding(hwaccel, gpu)
        self._gpu = gpu if self._handle else None
        self._done = threading.Event()
        self._changed = threading.Condition()  # guards the three that follow
        self._opened = False
        self._failure: Exception | None = None
        self._ready: deque[LiveFrame] = deque()
        self._codec = ""
        self._decoder = ""
        self._rate: Fraction | None = None
        self._damaged = 0
        self._pacer = Pacer()
        self.on_packet: PacketListener | None = None
        """Called with each coded frame, once it is decoded."""
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="saccade stream", daemon=True)
        self._thread.start()
        self._wait_until_open()

    @property
    def codec(self) -> str:
        """FFmpeg's name of the codec."""
        return self._codec

    @property
    def decoder(self) -> str:
        """What decodes it."""
        return self._decoder

    @property
    def rate(self) -> Fraction | None:
        """Frames a second, as announced; None when not announced."""
        return self._rate

    @property
    def heard_at(self) -> float:
        """`time.monotonic()` when a packet last arrived, in seconds."""
        return self._heard_at

    @property
    def media_at(self) -> float:
        """As `heard_at`: FFmpeg shows nothing but packets."""
        return self._heard_at

    @property
    def damaged(self) -> int:
        """Packets and frames that could not be decoded."""
        return self._damaged

    @property
    def stats(self) -> StreamStats | None:
        """None: it is not known."""
        return None

    def read(self, timeout_s: float) -> LiveFrame | None:
        """The next frame; None if there is none after `timeout_s` seconds.

        Raises:
            LiveError: if the connection is over.
            StreamEndedError: if what was opened is a recording, and is over.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._ready and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed.is_set():
                    return None
                self._changed.wait(min(left, _WAKE_S))
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            assert self._failure is not None
            raise self._failure

    def close(self) -> None:
        """Close the connection; its thread ends soon."""
        self._done.set()

    def _wait_until_open(self) -> None:
        deadline = time.monotonic() + _OPEN_S + SILENCE_S
        with self._changed:
            while not self._opened and not self._closed.is_set() and time.monotonic() < deadline:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_WAKE_S)

    def _hand_over(self, frame: LiveFrame, *, wait: bool) -> None:
        """Hand a frame over; where the reader is slow, wait for it, or let the oldest frame give way."""
        with self._changed:
            while wait and len(self._ready) >= _READY and not self._done.is_set() and not self._closed.is_set():
                self._changed.wait(_WAKE_S)
            self._ready.append(frame)
            while len(self._ready) > _READY:
                lost = 1 + self._ready.popleft().lost_before
                self._ready[0] = replace(self._ready[0], lost_before=self._ready[0].lost_before + lost)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            address = self._address
            with primary_context(self._gpu):
                container = av.open(
                    address.target,
                    format=address.format,
                    options=dict(address.options),
                    timeout=(_OPEN_S, SILENCE_S),
                    hwaccel=self._handle,
                    metadata_errors="replace",
                )
            with container:
                self._read(container)
        except (SourceError, StreamEndedError) as error:
            self._fail(error)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            shown = redact(self._address.target)
            authenticated = shown != self._address.target
            self._fail(explain(error, shown, opened=bool(self._codec), authenticated=authenticated))
        except Exception as error:
            self._fail(error)  # a bug of ours must not vanish with the thread

    def _read(self, container: InputContainer) -> None:
        what = redact(self._address.target)
        try:
            stream = choose_video(container)
        except NoVideoError as error:
            raise LiveError("codec unsupported", f"{what} {error}") from None
        set_live(stream.codec_context)
        self._codec = stream.codec_context.name
        self._rate = stream.average_rate or stream.guessed_rate
        recording = container.duration is not None
        with self._changed:
            self._opened = True
            self._changed.notify_all()
        paced = recording or container.format.name in _SEGMENTED
        self._decode(container, stream, paced=paced, recording=recording)
        if recording:
            raise StreamEndedError
        raise LiveError("connection failed", f"{what}: the stream has ended")

    def _decode(self, container: InputContainer, stream: VideoStream, *, paced: bool, recording: bool) -> None:
        """Hand frames over until the end; wait for a key frame after what cannot be decoded."""
        keyed, lost = False, 0
        tap = PacketTap(stream)
        for packet in container.demux(stream):
            if self._done.is_set() or self._closed.is_set():
                return
            arrived_at = self._heard_at = time.monotonic()
            try:
                frames = packet.decode()
            except av.error.EOFError:
                return
            except av.error.FFmpegError:
                self._damaged, keyed, lost = self._damaged + 1, False, lost + 1
                continue
            for frame in frames:
                keyed = (keyed or frame.key_frame) and not frame.is_corrupt
                if not keyed:
                    self._damaged, lost = self._damaged + frame.is_corrupt, lost + 1
                    continue
                self._decoder = running(stream.codec_context, frame.format.name)
                timestamp = None
                if frame.pts is not None and frame.time_base is not None:
                    timestamp = round(frame.pts * frame.time_base / LIVE_BASE)
                if paced and timestamp is not None:
                    delay_s = self._pacer.delay(float(timestamp * LIVE_BASE), time.monotonic())
                    if delay_s and self._done.wait(delay_s):
                        return
                    arrived_at = self._heard_at = time.monotonic()
                self._hand_over(LiveFrame(frame, timestamp, arrived_at, lost_before=lost), wait=recording)
                lost = 0
            if self.on_packet is not None:
                for coded in tap.packets(packet, time.monotonic()):
                    self.on_packet(coded)


def explain(error: Exception, what: str, *, opened: bool, authenticated: bool = False) -> SourceError:
    """FFmpeg's error as a reason and one line; `what` is the URL without its secrets."""
    if isinstance(error, av.error.ProtocolNotFoundError):
        scheme = what.partition("://")[0]
        return SourceError(
            f"{scheme}:// is not in this build of FFmpeg, which comes with PyAV; use RTSP, RTMP, HLS or UDP"
        )
    if isinstance(error, av.error.HTTPUnauthorizedError | av.error.HTTPForbiddenError):
        return LiveError("auth failed", f"{what}: the server refuses user name or password", refused=authenticated)
    if isinstance(error, av.error.HTTPNotFoundError | FileNotFoundError):
        return LiveError("not found", f"{what}: there is nothing")
    if isinstance(error, av.error.ExitError | TimeoutError):
        return LiveError("timeout", f"{what} does not answer")
    no_video = (av.error.InvalidDataError, av.error.EOFError, av.error.DecoderNotFoundError, ValueError)
    if isinstance(error, no_video) and not opened:
        return LiveError("codec unsupported", f"{what} is no video that FFmpeg can read")
    why = getattr(error, "strerror", None) or type(error).__name__
    if getattr(error, "errno", None) == errno.EIO:
        if what.startswith(("https://", "rtmps://")):
            return LiveError("tls", f"{what}: no secure connection ({why})")
        if what.startswith("http://") and not opened:  # such as the page on which a camera asks who one is
            why = "the server sends no video that FFmpeg can read, or hangs up before it"
    return LiveError("connection failed", f"{what}: {why}")
