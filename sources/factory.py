"""Opens a video source from a path, a URL or a webcam index."""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from saccade.addresses import with_plain_zone
from saccade.sources.base import Source
from saccade.sources.errors import LiveError, SourceError
from saccade.sources.file import FileSource
from saccade.sources.gpu import HwAccel
from saccade.sources.image_file import UnsupportedImageError
from saccade.sources.images import ImageSource, is_image
from saccade.sources.live.connection import LiveConnection
from saccade.sources.live.ffmpeg import FfmpegConnection, FfmpegInput
from saccade.sources.live.packets import Taps
from saccade.sources.live.source import LiveSource, Opener
from saccade.sources.network.dialer import CheckAddress, Dialer
from saccade.sources.network.tls import TlsPolicy
from saccade.sources.rtsp.connection import Loss, RtspConnection
from saccade.sources.rtsp.session import UnhandledCodecError
from saccade.sources.rtsp.transport import Transport, TransportChoice
from saccade.sources.urls import RtspAddress, check_port, redact, stream_name

if TYPE_CHECKING:
    from saccade.sources.onvif.device import OnvifAddress

log = logging.getLogger(__name__)

_SCHEME = re.compile(r"[a-z]+:/", re.IGNORECASE)  # an address that lacks a slash
_LIKE_ADDRESS = re.compile(r"[^@]+:[^@]*@.|[\w.-]+:\d+(/|$)|(\d+\.){3}\d+(/|$)")
_RTSP = ("rtsp", "rtsps")
_STREAMS = ("http", "https", "rtmp", "rtmps", "srt", "tcp", "udp")


def open_source(
    target: str | os.PathLike[str] | int,
    *,
    stream: str | None = None,
    vid_stride: int = 1,
    start: float | None = None,
    end: float | None = None,
    hwaccel: HwAccel = "auto",
    rtsp_transport: Transport = "auto",
    loss: Loss = "hide",
    tls: str = "verify",
    retry: bool = True,
    check_address: CheckAddress | None = None,
    paced: bool = False,
    largest: bool = False,
) -> Source:
    """Open a video file, an image, a folder of images, a live address, a webcam or a WebRTC endpoint.

    A live source connects when it is iterated. It retries an unreachable camera until the camera answers.

    Args:
        target: path, URL or webcam index.
        stream: name of the stream; derived from `target` if None.
        vid_stride: yield every `vid_stride`-th frame.
        start: skip frames before this time, in seconds from the beginning; not for live sources.
        end: stop before this time, in seconds from the beginning; not for live sources.
        hwaccel: decoder of live sources and paced files: "auto" uses a GPU if possible, "cuda" requires a GPU, "none"
            uses the CPU. Other files are decoded on the CPU.
        rtsp_transport: transport of RTSP; "auto" selects one.
        loss: "hide" drops frames with lost RTP packets; "show" yields them with `Frame.damaged` set.
        tls: server certificates to accept: "verify", "accept" (any) or "sha256:HEX" (one pinned certificate).
        retry: False makes a live source raise `LiveError` at its first failure instead of retrying.
        check_address: called before each connection with the URL and its host's IP addresses. It raises `SourceError`
            to forbid the connection.
        paced: True to play the file in real time and in a loop, like a camera.
        largest: whether to choose the ONVIF profile with the largest image, instead of a size that suits the model.

    Raises:
        SourceError: if `target` cannot be used.
    """
    try:
        text = os.fspath(str(target) if isinstance(target, int) else target)
    except TypeError:
        raise SourceError(f"a source must be a path, a URL or a webcam index, not {target!r:.100}") from None
    if not isinstance(text, str) or not text:  # an empty path would mean the current folder
        raise SourceError(f"a source must be a path, a URL or a webcam index, not {text!r:.100}")
    if "://" in text:
        text = with_plain_zone(text.strip())
    for name, value, known in (
        ("hwaccel", hwaccel, HwAccel),
        ("rtsp_transport", rtsp_transport, Transport),
        ("loss", loss, Loss),
    ):
        if value not in get_args(known):
            raise SourceError(f"{name} must be one of {', '.join(get_args(known))}; got {value!r}")
    if text.startswith("webrtc:"):
        if start is not None or end is not None:
            raise SourceError("a WebRTC source is live: remove start and end, which apply to files only")
        from saccade.sources.webrtc.listener import (
            WebRtcListener,  # imports aiortc and an HTTP server, which no other source needs
        )

        return WebRtcListener(text, stream=stream, vid_stride=vid_stride, hwaccel=hwaccel, retry=retry)
    settings = _LiveSettings(hwaccel, TransportChoice(rtsp_transport), loss, TlsPolicy.parse(tls), check_address)
    live = _live_source(text, settings, stream=stream, vid_stride=vid_stride, retry=retry, largest=largest)
    if live is not None:
        if start is not None or end is not None:
            raise SourceError(f"{redact(text)} is a live source: remove start and end, which apply to files only")
        return live
    path = Path(text)
    _check_path(path)
    if path.is_dir() or is_image(path):
        try:
            return ImageSource(path, stream=stream, vid_stride=vid_stride, start=start, end=end)
        except UnsupportedImageError:
            log.debug("%s: Pillow cannot read this image; trying FFmpeg", path)
    how: HwAccel = hwaccel if paced else "none"
    return FileSource(path, stream=stream, vid_stride=vid_stride, start=start, end=end, hwaccel=how, paced=paced)


def check_source(target: str) -> None:
    """Check a source's path or address without opening it.

    Raises:
        SourceError: if `open_source` would reject the address, or the file does not exist.
    """
    if "://" in target:
        settings = _LiveSettings("auto", TransportChoice("auto"), "hide", TlsPolicy(), None)
        _live_source(with_plain_zone(target.strip()), settings)
    elif not target.startswith("webrtc:") and not target.isdecimal():
        _check_path(Path(target))
        if not Path(target).exists():
            raise SourceError(f"no such file: {target}")


def _check_path(path: Path) -> None:
    """Raise SourceError if a path cannot be accessed, or if it looks like a network address without a scheme."""
    try:
        if path.exists():
            return
    except OSError as error:
        raise SourceError(f"{str(path)[:100]}… cannot be read: {error.strerror}") from None
    if _LIKE_ADDRESS.match(str(path)):
        shown = redact(f"rtsp://{_SCHEME.sub('', str(path))}")
        raise SourceError(f"no such file: {shown.removeprefix('rtsp://')}; an address begins with rtsp:// or http://")


@dataclass(slots=True, frozen=True)
class _LiveSettings:
    """Settings for all connections of a live source."""

    hwaccel: HwAccel
    choice: TransportChoice
    loss: Loss
    tls: TlsPolicy
    check: CheckAddress | None

    def open_ffmpeg(self, address: FfmpegInput, closed: threading.Event, gpu: int | None, taps: Taps) -> LiveConnection:
        dialer = Dialer(closed, self.tls, self.check)
        return FfmpegConnection(address, dialer, hwaccel=self.hwaccel, gpu=gpu, taps=taps)

    def open_rtsp(self, address: RtspAddress, closed: threading.Event, gpu: int | None, taps: Taps) -> LiveConnection:
        try:
            return RtspConnection(
                address,
                closed,
                choice=self.choice,
                hwaccel=self.hwaccel,
                gpu=gpu,
                loss=self.loss,
                tls=self.tls,
                check_address=self.check,
                taps=taps,
            )
        except UnhandledCodecError as unhandled:
            address = unhandled.address
            if self.check is not None:  # FFmpeg would follow any redirect
                raise LiveError(
                    "codec unsupported",
                    f"{redact(address.url)}: only H.264 and H.265 are supported while source addresses are restricted",
                ) from None
            return self.open_ffmpeg(FfmpegInput.of_rtsp(address, self.choice.way), closed, gpu, taps)

    def open_onvif(
        self, device: OnvifAddress, name: str, largest: bool, closed: threading.Event, gpu: int | None, taps: Taps
    ) -> LiveConnection:
        """Connect to the RTSP stream of an ONVIF device. The device is asked for the address of the stream."""
        from saccade.sources.onvif.device import best_profile, checked_address, largest_profile, read_profiles

        address = checked_address(device, Dialer(closed, self.tls, self.check))
        profiles = read_profiles(address, there_only=self.check is not None)
        chosen = [profile for profile in profiles if profile.token == device.token] if device.token else profiles
        if not chosen:
            known = ", ".join(profile.token for profile in profiles)
            raise LiveError("not found", f"{device.host} has no ONVIF profile '{device.token}'; available: {known}")
        profile = largest_profile(chosen) if largest else best_profile(chosen)
        size, purpose = f"{profile.width}x{profile.height}", "recordings" if largest else "analysis"
        log.info("stream %s: uses ONVIF profile %r (%s %s) for %s", name, profile.token, profile.codec, size, purpose)
        return self.open_rtsp(device.stream(profile), closed, gpu, taps)


def _live_source(
    text: str,
    settings: _LiveSettings,
    *,
    stream: str | None = None,
    vid_stride: int = 1,
    retry: bool = True,
    largest: bool = False,
) -> LiveSource | None:
    """Return a source for a live URL or a webcam index, or None if `text` is neither. Do not connect yet."""
    scheme, separator, _ = text.partition("://")
    scheme = scheme.lower()
    name = stream or stream_name(text)
    opener: Opener
    if not separator:
        if not text.isdecimal() or Path(text).exists():
            return None
        name = stream or f"camera{text}"
        opener = partial(settings.open_ffmpeg, FfmpegInput.of_camera(int(text)))
    elif scheme in _RTSP:
        opener = partial(settings.open_rtsp, RtspAddress.parse(text))
    elif scheme == "onvif":
        from saccade.sources.onvif import OnvifAddress, OnvifSource  # only for those who use it

        opener = partial(settings.open_onvif, OnvifAddress.parse(text), name, largest)
        return OnvifSource(text, opener, stream=name, vid_stride=vid_stride, retry=retry, check=settings.check)
    elif scheme in _STREAMS:
        check_port(text)
        opener = partial(settings.open_ffmpeg, FfmpegInput.of_url(text))
    else:  # show only the scheme, since the rest may contain a password
        known = ", ".join((*(f"{name}://" for name in (*_RTSP, "onvif", *_STREAMS)), "webrtc:PORT"))
        raise SourceError(f"{scheme}:// sources are not supported; use {known}, a file, a folder or a webcam index")
    return LiveSource(text, opener, stream=name, vid_stride=vid_stride, retry=retry)
