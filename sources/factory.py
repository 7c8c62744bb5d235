"""Finds the right source for what a user typed. Knows nothing of models, results or sinks."""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import replace
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

_SCHEME = re.compile(r"[a-z]+:/", re.IGNORECASE)  # with a slash missing
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
) -> Source:
    """Open a video file, a frame, a folder of frames, a live address, a webcam or an endpoint for WebRTC.

    A live source connects when it is iterated; a camera that cannot be reached is retried until it can.

    Args:
        target: what the user typed; a number is that of a webcam.
        stream: name of the stream; made from `target` if None.
        vid_stride: hand on every `vid_stride`-th frame.
        start: skip frames before this time, in seconds from the beginning; not for live sources.
        end: stop before this time, in seconds from the beginning; not for live sources.
        hwaccel: decode live sources, and files that are paced, on the GPU if there is one, insist on it, or leave it
            alone.
        rtsp_transport: how RTSP cameras send their frames; auto finds out.
        loss: hide frames that RTSP packets are missing from, or show them, with `Frame.damaged`.
        tls: certificates accepted from servers, on every connection: verify, accept (any) or sha256:HEX (this one).
        retry: False for a live source that raises `LiveError` at the first failure instead of trying again for ever.
        check_address: called with each address before it is connected to, those of redirects, playlists and segments
            among them, and with what its host was looked up to be; raises `SourceError` to refuse it.
        paced: a file is read again and again, at its own pace, as one of many.

    Raises:
        SourceError: if `target` cannot be used, in one line for the user.
    """
    try:
        text = os.fspath(str(target) if isinstance(target, int) else target)
    except TypeError:
        raise SourceError(f"a source is a path, an address or a webcam's number, not {target!r:.100}") from None
    if not isinstance(text, str) or not text:  # an empty path would be the folder that one happens to be in
        raise SourceError(f"a source is a path, an address or a webcam's number, not {text!r:.100}")
    if "://" in text:
        text = with_plain_zone(text.strip())
    for name, value, known in (
        ("hwaccel", hwaccel, HwAccel),
        ("rtsp_transport", rtsp_transport, Transport),
        ("loss", loss, Loss),
    ):
        if value not in get_args(known):
            raise SourceError(f"{name} is one of {', '.join(get_args(known))}; got {value!r}")
    if text.startswith("webrtc:"):
        if start is not None or end is not None:
            raise SourceError("webrtc: is live: start and end are for files")
        from saccade.sources.webrtc.listener import (
            WebRtcListener,  # imports aiortc and an HTTP server, which no other source needs
        )

        return WebRtcListener(text, stream=stream, vid_stride=vid_stride, hwaccel=hwaccel, retry=retry)
    opener = _live_opener(text, hwaccel, rtsp_transport, loss, tls, check_address)
    if opener:
        if start is not None or end is not None:
            raise SourceError(f"{redact(text)} is live: start and end are for files")
        name = stream or (f"camera{text}" if text.isdecimal() else stream_name(text))
        return LiveSource(text, opener, stream=name, vid_stride=vid_stride, retry=retry)
    path = Path(text)
    _check_path(path)
    if path.is_dir() or is_image(path):
        try:
            return ImageSource(path, stream=stream, vid_stride=vid_stride, start=start, end=end)
        except UnsupportedImageError:
            log.debug("%s: Pillow does not read this kind of image; FFmpeg may", path)
    how: HwAccel = hwaccel if paced else "none"
    return FileSource(path, stream=stream, vid_stride=vid_stride, start=start, end=end, hwaccel=how, paced=paced)


def check_source(target: str) -> None:
    """Refuse an address that `open_source` would refuse, and a file that is not there. Nothing is opened.

    Raises:
        SourceError: in one line for the user.
    """
    if "://" in target:
        _live_opener(with_plain_zone(target.strip()), "auto", "auto", "hide", "verify", None)
    elif not target.startswith("webrtc:") and not target.isdecimal():
        _check_path(Path(target))
        if not Path(target).exists():
            raise SourceError(f"no such file: {target}")


def _check_path(path: Path) -> None:
    """Refuse what is no path: too long for one, or an address that lacks its beginning, whose password stays unsaid."""
    try:
        if path.exists():
            return
    except OSError as error:
        raise SourceError(f"{str(path)[:100]}… cannot be read: {error.strerror}") from None
    if _LIKE_ADDRESS.match(str(path)):
        shown = redact(f"rtsp://{_SCHEME.sub('', str(path))}")
        raise SourceError(f"no such file: {shown.removeprefix('rtsp://')}; an address begins with rtsp:// or http://")


def _live_opener(
    text: str, hwaccel: HwAccel, transport: Transport, loss: Loss, tls: str, check: CheckAddress | None
) -> Opener | None:
    """What connects to a live address or webcam; None if `text` is neither."""
    scheme, separator, _ = text.partition("://")
    scheme = scheme.lower()
    policy, choice = TlsPolicy.parse(tls), TransportChoice(transport)
    if not separator:
        if not text.isdecimal() or Path(text).exists():
            return None
        address = FfmpegInput.of_camera(int(text))
    elif scheme in _RTSP:
        rtsp = RtspAddress.parse(text)
        return lambda closed, gpu, taps: _open_rtsp(rtsp, closed, hwaccel, gpu, choice, loss, policy, check, taps)
    elif scheme == "onvif":
        from saccade.sources.onvif.device import OnvifAddress  # only for those who use it

        device = OnvifAddress.parse(text)
        return lambda closed, gpu, taps: _open_onvif(device, closed, hwaccel, gpu, choice, loss, policy, check, taps)
    elif scheme in _STREAMS:
        check_port(text)
        address = FfmpegInput.of_url(text)
    else:  # only the scheme is shown, since the rest may hold a password
        known = ", ".join((*(f"{name}://" for name in (*_RTSP, "onvif", *_STREAMS)), "webrtc:PORT"))
        raise SourceError(f"{scheme}:// is not a kind of source; use {known}, a file, a folder or a webcam's number")
    return lambda closed, gpu, taps: FfmpegConnection(
        address, Dialer(closed, policy, check), hwaccel=hwaccel, gpu=gpu, taps=taps
    )


def _open_onvif(
    device: OnvifAddress,
    closed: threading.Event,
    hwaccel: HwAccel,
    gpu: int | None,
    choice: TransportChoice,
    loss: Loss,
    tls: TlsPolicy,
    check: CheckAddress | None,
    taps: Taps,
) -> LiveConnection:
    """Ask the device where it streams, for each connection, since its configuration may have changed."""
    from saccade.sources.onvif.device import best_profile, read_profiles

    asked = device
    if check is not None:
        asked = replace(device, host=Dialer(closed, tls, check).look_up(device.url, device.host)[0])
    profiles = read_profiles(asked, there_only=check is not None)
    chosen = [profile for profile in profiles if profile.token == device.token] if device.token else profiles
    if not chosen:
        known = ", ".join(profile.token for profile in profiles)
        raise LiveError("not found", f"{device.host} has no profile '{device.token}'; there are {known}")
    return _open_rtsp(device.stream(best_profile(chosen)), closed, hwaccel, gpu, choice, loss, tls, check, taps)


def _open_rtsp(
    address: RtspAddress,
    closed: threading.Event,
    hwaccel: HwAccel,
    gpu: int | None,
    choice: TransportChoice,
    loss: Loss,
    tls: TlsPolicy,
    check: CheckAddress | None,
    taps: Taps,
) -> LiveConnection:
    try:
        return RtspConnection(
            address, closed, choice=choice, hwaccel=hwaccel, gpu=gpu, loss=loss, tls=tls, check_address=check, taps=taps
        )
    except UnhandledCodecError as unhandled:
        address = unhandled.address
        if check is not None:  # FFmpeg would follow any redirect
            raise LiveError(
                "codec unsupported", f"{redact(address.url)}: only H.264 and H.265 where sources are restricted"
            ) from None
        return FfmpegConnection(
            FfmpegInput.of_rtsp(address, choice.way), Dialer(closed, tls, check), hwaccel=hwaccel, gpu=gpu, taps=taps
        )
