"""Live streams through FFmpeg: HLS, RTMP, MPEG-TS over UDP, SRT, webcams, and RTSP with rare codecs.

FFmpeg runs in a separate thread, which ends at most 20 s after `close`. Saccade itself opens all TLS connections
(`HttpFiles`, `Relay`) and parses Motion JPEG over HTTP.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NoReturn, cast
from urllib.parse import urlsplit

import av
import av.error
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.video.stream import VideoStream

from saccade.sources.errors import LiveError, SourceError, StreamEndedError
from saccade.sources.gpu import HwAccel, gpu_decoding, primary_context, running
from saccade.sources.live.clock import LIVE_BASE
from saccade.sources.live.connection import LiveFrame, StreamStats
from saccade.sources.live.decoder import Decoder, set_live
from saccade.sources.live.mjpeg import JpegSplitter, NoJpegError, is_mjpeg
from saccade.sources.live.pacer import Pacer
from saccade.sources.live.packets import AudioTap, CodedPacket, PacketTap, Taps
from saccade.sources.live.reconnect import NO_PACKETS_S
from saccade.sources.network.dialer import Dialer
from saccade.sources.network.http_files import HttpFile, HttpFiles
from saccade.sources.network.relay import Relay
from saccade.sources.rgb import display_matrix_of, pixel_aspect_of
from saccade.sources.urls import RtspAddress, host_and_port, redact
from saccade.sources.video_stream import NoVideoError, choose_video

_OPEN_S = 10.0  # HLS requests a playlist, a variant and a segment first
_FIRST_S = 4.0  # extra time, for a camera that sends an image every 10 s
_SEGMENTED = ("hls", "dash")  # frames arrive in one burst per segment
_READY = 2  # frames decoded ahead; a live stream drops the older frame
_WAKE_S = 0.1
_READ = 64 << 10
# Probe for half a second; FFmpeg's default of 5 s is meant for files whose audio begins late. `fflags=nobuffer` would
# drop the probed packets, so that a recording would begin in its middle.
_PROBE = {"analyzeduration": "500000", "probesize": "500000"}


@dataclass(slots=True, frozen=True)
class FfmpegInput:
    """Address and options of an input that FFmpeg opens.

    Attributes:
        target: URL or device name.
        format: FFmpeg's name of the format; None to detect it.
        options: FFmpeg's options.
        protocols: FFmpeg protocols to allow, separated by commas; "" allows all, as webcams require.
        server: (host, port, TLS) of a server that FFmpeg must reach through a `Relay`; None to connect directly.
    """

    target: str
    format: str | None = None
    options: Mapping[str, str] = field(default_factory=lambda: dict(_PROBE))
    protocols: str = ""
    server: tuple[str, int, bool] | None = None

    def __repr__(self) -> str:
        return f"FfmpegInput({redact(self.target)!r})"  # a traceback or log must not show the password

    @property
    def is_http(self) -> bool:
        """Whether the target is an HTTP or HTTPS URL."""
        return self.target.lower().startswith(("http://", "https://"))

    @classmethod
    def of_url(cls, url: str) -> FfmpegInput:
        """Return FFmpeg's URL and options for a URL of any protocol except RTSP.

        Raises:
            SourceError: if the URL is malformed.
        """
        scheme, _, rest = url.partition("://")
        scheme = scheme.lower()
        if scheme in ("http", "https"):
            return cls(url, protocols="data")
        if scheme not in ("rtmp", "rtmps"):
            return cls(f"{scheme}://{rest}", protocols=scheme)
        host, port = host_and_port(url)
        if not host:
            raise SourceError(f"{redact(url)} is not a valid RTMP address; write rtmp://host/application/stream")
        place = urlsplit(url).netloc.rpartition("@")[2]
        # The address sent to the server, which may select the application by it.
        options = {**_PROBE, "rtmp_tcurl": f"{scheme}://{place}/{_rtmp_application(url)}"}
        secure = scheme == "rtmps"
        server = (host, port or (443 if secure else 1935), secure)
        return cls(f"{scheme}://{rest}", options=options, protocols="rtmp,tcp", server=server)

    @classmethod
    def of_rtsp(cls, address: RtspAddress, transport: str) -> FfmpegInput:
        """Return FFmpeg's URL and options for an RTSP stream that is neither H.264 nor H.265."""
        way = {"auto": "tcp", "multicast": "udp_multicast"}.get(transport, transport)
        server = None
        if address.tls:
            way = "http" if way == "http" else "tcp"
            server = (address.host, 443 if way == "http" and address.default_port else address.port, True)
        options = {"rtsp_transport": way, "fflags": "nobuffer", "analyzeduration": "0", "probesize": "32"}
        protocols = "tcp,http" if address.tls else "tcp,http,udp,rtp"
        return cls(address.with_credentials, options=options, protocols=protocols, server=server)

    @classmethod
    def of_camera(cls, number: int) -> FfmpegInput:
        """Return FFmpeg's device name and format for a webcam, selected by its number from 0.

        Raises:
            SourceError: if this build of FFmpeg does not support webcams.
        """
        form, target = ("avfoundation", str(number)) if sys.platform == "darwin" else ("v4l2", f"/dev/video{number}")
        if form not in av.formats_available:
            raise SourceError(
                f"camera {number}: the installed FFmpeg does not support webcams ({form} is missing); "
                "serve the webcam over RTSP"
            )
        return cls(target, form)


class FfmpegConnection:
    """A connection to a live source through FFmpeg. The constructor opens the connection.

    Args:
        address: URL or device, with FFmpeg's options.
        dialer: opens the network connections.
        hwaccel: "auto" to decode on a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.
        gpu: index of the GPU that stores the decoded frames, see `gpu_decoding`.
        taps: callbacks that receive the encoded packets; None for none.

    Raises:
        LiveError: if the connection cannot be opened.
        SourceError: if this build of FFmpeg does not support the protocol, or a required GPU cannot decode.
    """

    def __init__(
        self,
        address: FfmpegInput,
        dialer: Dialer,
        *,
        hwaccel: HwAccel = "none",
        gpu: int | None = None,
        taps: Taps | None = None,
    ) -> None:
        self._address = address
        self._dialer = dialer
        self._closed = dialer.closed
        # FFmpeg cannot pin certificates, so it gets no TLS connection of its own.
        self._files = HttpFiles(dialer, _OPEN_S, NO_PACKETS_S)
        self._hwaccel: HwAccel = hwaccel
        self._handle = gpu_decoding(hwaccel, gpu)
        self._gpu = gpu if self._handle else None
        self._done = threading.Event()
        self._changed = threading.Condition()  # guards the next three attributes
        self._opened = False
        self._failure: Exception | None = None
        self._ready: deque[LiveFrame] = deque()
        self._codec = ""
        self._decoder = ""
        self._rate: Fraction | None = None
        self._damaged = 0
        self._pacer = Pacer()
        self._taps = taps or Taps()
        self._heard_at = time.monotonic()
        # In a thread, because FFmpeg's calls cannot be interrupted.
        self._thread = threading.Thread(target=self._work, name="saccade stream", daemon=True)
        self._thread.start()
        self._wait_until_open()

    @property
    def codec(self) -> str:
        """FFmpeg's name of the video codec, such as "h264"."""
        return self._codec

    @property
    def decoder(self) -> str:
        """Name of the decoder in use, such as "h264 (cuda)"."""
        return self._decoder

    @property
    def rate(self) -> Fraction | None:
        """Frame rate that the stream declares, in frames per second, or None."""
        return self._rate

    @property
    def heard_at(self) -> float:
        """Arrival time of the newest video data, in seconds of `time.monotonic()`. Audio does not count."""
        return self._heard_at

    @property
    def media_at(self) -> float:
        """Arrival time of the newest video data, in seconds of `time.monotonic()`."""
        return self._heard_at

    @property
    def damaged(self) -> int:
        """Number of packets and frames that could not be decoded."""
        return self._damaged

    @property
    def stats(self) -> StreamStats | None:
        """Always None, because FFmpeg provides no packet statistics."""
        return None

    def read(self, timeout_s: float) -> LiveFrame | None:
        """Return the next frame, or None if no frame arrives within `timeout_s` seconds.

        Raises:
            LiveError: if the connection has failed.
            StreamEndedError: if a stream of limited length has ended.
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
        """Close the connection. Its FFmpeg thread ends within 20 s."""
        self._done.set()
        self._files.close()
        with self._changed:
            self._failure = None  # its traceback references this object, which owns a decoder with threads

    def _wait_until_open(self) -> None:
        deadline = time.monotonic() + _OPEN_S + _FIRST_S
        with self._changed:
            while not self._opened and not self._closed.is_set() and time.monotonic() < deadline:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_WAKE_S)

    def _hand_over(self, frame: LiveFrame, *, wait: bool) -> None:
        """Queue a frame for `read`. If the queue is full, wait for space if `wait` is True, else drop the oldest."""
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
            if not self._done.is_set():
                self._failure = error
            self._changed.notify_all()

    def _work(self) -> None:
        files = self._files
        try:
            first = None
            if self._address.is_http:
                first = files.open_first(self._address.target)
                if not first.is_playlist and is_mjpeg(first.content_type, first.peek):
                    self._read_jpegs(first)
            with self._reach(first) as (target, form), primary_context(self._gpu):
                container = av.open(
                    target,
                    format=form,
                    options=self._options(),
                    timeout=(_OPEN_S, NO_PACKETS_S),
                    io_open=files.open if self._address.is_http else None,
                    hwaccel=self._handle,
                    metadata_errors="replace",
                )
                with container:
                    self._read(container)
        except (SourceError, StreamEndedError) as error:
            self._fail(files.refused or error)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            shown = redact(self._address.target)
            authenticated = shown != self._address.target
            known = files.refused or (None if self._codec else files.failure)
            self._fail(known or explain(error, shown, opened=bool(self._codec), authenticated=authenticated))
        except Exception as error:
            self._fail(error)  # our own bug must not vanish with the thread
        finally:
            files.free()

    @contextmanager
    def _reach(self, first: HttpFile | None) -> Iterator[tuple[str, str | None]]:
        """Yield the URL for FFmpeg to open, and FFmpeg's name of the format (None to detect it).

        RTMP, RTMPS and RTSPS connections go through a local relay, which runs until the context ends.
        """
        address, dialer = self._address, self._dialer
        target = address.target
        if address.is_http:
            yield target, "hls" if first is not None and first.is_playlist else None
        elif address.server is not None:
            host, port, secure = address.server
            with Relay(lambda: dialer.connect(target, host, port, secure=secure)) as relay:
                clear = re.sub("^(rtmp|rtsp)s:", r"\1:", target)
                yield _with_place(clear, f"127.0.0.1:{relay.port}"), address.format
        else:
            if dialer.check is not None and "://" in target:
                target = self._checked(target)
            yield target, address.format

    def _checked(self, url: str) -> str:
        """Return the URL with its host replaced by an IP address. Raise SourceError if the address is forbidden."""
        host, port = host_and_port(url)
        if not host:  # FFmpeg listens on this address
            self._dialer.allow(url, [])
            return url
        numeric = self._dialer.look_up(url, host)[0]
        numeric = f"[{numeric}]" if ":" in numeric else numeric
        return _with_place(url, numeric if port is None else f"{numeric}:{port}")

    def _options(self) -> dict[str, str]:
        options = dict(self._address.options)
        if self._address.protocols:
            options["protocol_whitelist"] = self._address.protocols
        if self._address.is_http:
            options["http_persistent"] = "0"  # FFmpeg's HLS demuxer would reuse our files as its own connections
        return options

    def _read_jpegs(self, file: HttpFile) -> NoReturn:
        """Read and decode a Motion JPEG stream, and queue each frame on arrival.

        Raises:
            StreamEndedError: at the end of a stream of limited length.
            LiveError: if the connection fails or is closed, or if the stream contains no JPEG images.
        """
        what = redact(self._address.target)
        is_image = file.content_type.startswith("image/")
        if not is_image or file.length is None:
            file.read_without_end()
        decoder = Decoder("mjpeg", hwaccel=self._hwaccel, gpu=self._gpu)
        splitter, pts, lost, seen = JpegSplitter(), 0, 0, 0
        self._codec = "mjpeg"
        while data := file.read(_READ):
            self._heard_at = time.monotonic()
            try:
                images = list(splitter.feed(data, self._heard_at))
            except NoJpegError:
                raise LiveError("codec unsupported", f"{what} sends no JPEG images") from None
            for image, arrived_at in images:
                seen += 1
                pts = max(pts + 1, round(arrived_at / LIVE_BASE))
                try:
                    frames = decoder.decode(image, pts)
                except av.error.FFmpegError:
                    self._damaged, lost = self._damaged + 1, lost + 1
                    continue
                self._decoder = decoder.name
                self._mark_open()
                for frame in frames:
                    self._hand_over(LiveFrame(frame, None, arrived_at, lost_before=lost), wait=False)
                    lost = 0
                self._taps.take(CodedPacket("mjpeg", b"", image, pts, arrived_at, True))
        if self._opened and is_image and (file.length is not None or seen == 1):
            raise StreamEndedError
        raise LiveError("connection failed", f"{what}: the stream has ended")

    def _mark_open(self) -> None:
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def _read(self, container: InputContainer) -> None:
        what = redact(self._address.target)
        try:
            stream = choose_video(container)
        except NoVideoError as error:
            raise LiveError("codec unsupported", f"{what}: {error}") from None
        set_live(stream.codec_context)
        self._codec = stream.codec_context.name
        self._rate = stream.average_rate or stream.guessed_rate
        recording = container.duration is not None
        self._mark_open()
        paced = recording or container.format.name in _SEGMENTED
        self._decode(container, stream, paced=paced, recording=recording)
        if recording:
            raise StreamEndedError
        raise LiveError("connection failed", f"{what}: the stream has ended")

    def _video_packets(self, container: InputContainer, stream: VideoStream) -> Iterator[av.Packet[VideoStream]]:
        """Yield the video packets. Pass the audio packets to the registered audio callbacks."""
        sound = next(iter(container.streams.audio), None) if self._taps.sound else None
        if sound is None:
            yield from container.demux(stream)
            return
        tap = AudioTap(sound)
        for packet in container.demux([stream, sound]):
            if packet.stream_index != sound.index:
                yield cast("av.Packet[VideoStream]", packet)
                continue
            for piece in tap.packets(cast("av.Packet[AudioStream]", packet)):
                self._taps.take(piece)

    def _decode(self, container: InputContainer, stream: VideoStream, *, paced: bool, recording: bool) -> None:
        """Decode and queue frames until the stream ends. After a decoding error, skip to the next keyframe."""
        keyed, lost = False, 0
        tap = PacketTap(stream)
        form: object = None  # frame format for which `matrix` was read
        matrix: tuple[int, ...] | None = None
        for packet in self._video_packets(container, stream):
            if self._done.is_set() or self._closed.is_set():
                return
            arrived_at = self._heard_at = time.monotonic()
            try:
                frames = packet.decode() if self._taps.decode else []
            except av.error.EOFError:
                return
            except av.error.FFmpegError:
                self._damaged, keyed, lost = self._damaged + 1, False, lost + 1
                frames = []
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
                aspect = pixel_aspect_of(stream.sample_aspect_ratio, stream.codec_context.sample_aspect_ratio)
                shown = LiveFrame(frame, timestamp, arrived_at, lost_before=lost, pixel_aspect=aspect)
                if form != (form := (frame.width, frame.height, frame.rotation)):
                    matrix = display_matrix_of(frame)
                self._hand_over(shown, wait=recording)
                lost = 0
            if self._taps.video:
                for coded in tap.packets(packet, time.monotonic(), matrix):
                    self._taps.take(coded)


def explain(error: Exception, what: str, *, opened: bool, authenticated: bool = False) -> SourceError:
    """Convert an error of FFmpeg to a `SourceError` with a one-line message.

    Args:
        error: exception that FFmpeg raised.
        what: the URL without credentials, for the message.
        opened: whether the error occurred after the connection was opened.
        authenticated: whether the URL contains a password.
    """
    if isinstance(error, av.error.ProtocolNotFoundError):
        scheme = what.partition("://")[0]
        return SourceError(
            f"{scheme}:// is not supported by this build of FFmpeg (from PyAV); use RTSP, RTMP, HLS or UDP"
        )
    if isinstance(error, av.error.HTTPUnauthorizedError | av.error.HTTPForbiddenError):  # also of RTSP
        return LiveError("auth failed", f"{what}: the server rejects the user name or password", refused=authenticated)
    if isinstance(error, av.error.HTTPNotFoundError | FileNotFoundError):
        return LiveError("not found", f"{what}: the server has no such stream; check the path")
    if isinstance(error, av.error.ExitError | TimeoutError):
        return LiveError("timeout", f"{what} does not answer")
    no_video = (av.error.InvalidDataError, av.error.EOFError, av.error.DecoderNotFoundError, ValueError)
    if isinstance(error, no_video) and not opened:
        return LiveError("codec unsupported", f"{what} is not a video that FFmpeg can read")
    why = getattr(error, "strerror", None) or type(error).__name__
    return LiveError("connection failed", f"{what}: {why}")


def _with_place(url: str, place: str) -> str:
    scheme, _, rest = url.partition("://")
    end = next((at for at, character in enumerate(rest) if character in "/?#"), len(rest))
    credentials, separator, _ = rest[:end].rpartition("@")
    return f"{scheme}://{credentials}{separator}{place}{rest[end:]}"


def _rtmp_application(url: str) -> str:
    """Return the application name of an RTMP URL by FFmpeg's rules, such as "live" or "app/instance"; "" for none."""
    path = urlsplit(url).path
    first, _, rest = path.removeprefix("/").partition("/")
    if not rest:
        return ""
    instance, separator, _ = rest.partition("/")
    if first == "ondemand" or not separator or ":" in instance:
        return first
    return f"{first}/{instance}"
