"""Opens an RTSP session: DESCRIBE, SETUP of video and audio, PLAY. Follows redirects."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from urllib.parse import urljoin

from saccade.sources.errors import LiveError, SourceError
from saccade.sources.network.dialer import CheckAddress
from saccade.sources.network.tls import TlsPolicy
from saccade.sources.rtp.audio import CODECS as AUDIO_CODECS
from saccade.sources.rtp.h26x import Codec
from saccade.sources.rtsp.client import RedirectError, RtspClient
from saccade.sources.rtsp.sdp import Media, parse_sdp
from saccade.sources.rtsp.srtp import SrtpReceiver
from saccade.sources.rtsp.transport import TransportChoice, TransportRefusedError
from saccade.sources.urls import RtspAddress, redact

log = logging.getLogger(__name__)

CODECS: dict[str, Codec] = {"H264": "h264", "H265": "hevc", "HEVC": "hevc"}
_MAX_ATTEMPTS = 5  # redirects and transports
_KEEPALIVE_S = 25.0  # at most; some cameras hang up after 30 s whatever they announce


class UnhandledCodecError(Exception):
    """Raised if the camera's video is neither H.264 nor H.265. `address` is the camera's address after redirects."""

    def __init__(self, address: RtspAddress) -> None:
        super().__init__("neither H.264 nor H.265")
        self.address = address


@dataclass(slots=True)
class RtspSession:
    """An RTSP session that is playing.

    Attributes:
        client: connection to the RTSP server.
        media: description of the video stream in the SDP.
        codec: FFmpeg's name of the video codec.
        control: URL of the session.
        keepalive: RTSP method that keeps the session alive.
        keepalive_s: interval between keepalives in seconds.
        srtp: decrypts the video packets; None for plain RTP.
        sound: description of the audio stream, which is the client's second stream; None without audio.
        sound_srtp: decrypts the audio packets; None for plain RTP.
        began: RTP timestamps of video and audio at the same moment, from the reply to PLAY; None if not stated.
    """

    client: RtspClient
    media: Media
    codec: Codec
    control: str
    keepalive: str
    keepalive_s: float
    srtp: SrtpReceiver | None = None
    sound: Media | None = None
    sound_srtp: SrtpReceiver | None = None
    began: tuple[int, int] | None = None


def open_session(
    address: RtspAddress,
    closed: threading.Event,
    choice: TransportChoice,
    tls: TlsPolicy | None = None,
    check_address: CheckAddress | None = None,
    *,
    sound: bool = False,
) -> RtspSession:
    """Connect to an RTSP server and play the video stream.

    Args:
        address: address of the stream.
        closed: event; setting it aborts all blocking calls.
        choice: selects the transport. If the server refuses it, another transport is tried.
        tls: which TLS certificates to accept.
        check_address: raises SourceError for a forbidden address, also after a redirect; None to allow any.
        sound: whether to play audio too, if its codec is supported.

    Raises:
        LiveError: if the stream cannot be played.
        UnhandledCodecError: if the video is neither H.264 nor H.265.
    """
    for _ in range(_MAX_ATTEMPTS):
        client = RtspClient(address, closed, choice.way, tls, check_address)
        try:
            return _play(client, address, sound=sound)
        except RedirectError as redirect:
            client.close()
            try:
                address = address.redirected(str(redirect))
            except SourceError as error:
                raise LiveError("connection failed", f"the server redirects to an invalid URL: {error}") from None
        except TransportRefusedError:
            client.close()
            if not choice.refused():
                raise
        except BaseException:
            client.close()
            raise
    raise LiveError("connection failed", f"the server redirects more than {_MAX_ATTEMPTS - 1} times")


def _play(client: RtspClient, address: RtspAddress, *, sound: bool) -> RtspSession:
    public = client.request("OPTIONS").header("public").upper()
    reply = client.request("DESCRIBE", headers={"Accept": "application/sdp"})
    base = reply.header("content-base") or reply.header("content-location")
    try:
        base = urljoin(address.url, base)
    except ValueError:
        base = address.url
    description = parse_sdp(reply.body, base)
    media = _video(description.medias, address)
    srtp = SrtpReceiver(media) if "SAVP" in media.profile else None
    timeout_s = client.setup(media)
    heard = _set_up_sound(client, description.medias, address) if sound else None
    playing = client.request("PLAY", description.control, {"Range": "npt=0.000-"})
    times = [rtp_time_of(playing.header("rtp-info"), one.control) for one in (media, heard) if one]
    return RtspSession(
        client=client,
        media=media,
        codec=CODECS[media.encoding],
        control=description.control,
        keepalive="GET_PARAMETER" if "GET_PARAMETER" in public else "OPTIONS",
        keepalive_s=min(_KEEPALIVE_S, timeout_s / 2),
        srtp=srtp,
        sound=heard,
        sound_srtp=SrtpReceiver(heard) if heard and "SAVP" in heard.profile else None,
        began=(times[0], times[1]) if len(times) == 2 and times[0] is not None and times[1] is not None else None,
    )


def rtp_time_of(info: str, control: str) -> int | None:
    """Return a stream's first RTP timestamp from an RTP-Info header, or None if the header does not state it.

    Args:
        info: value of the header.
        control: URL of the stream.
    """
    for text in re.split(r",\s*(?=url=)", info):
        fields = dict(part.strip().partition("=")[::2] for part in text.split(";"))
        url, time = fields.get("url", "").strip('"'), fields.get("rtptime", "")
        if url and (control == url or control.endswith(f"/{url}")) and time.isdecimal() and len(time) <= 10:
            return int(time)
    return None


def _set_up_sound(client: RtspClient, medias: list[Media], address: RtspAddress) -> Media | None:
    """Set up the first audio stream with a supported codec. Return its description, or None without audio."""
    offered = [media for media in medias if media.kind == "audio"]
    for media in offered:
        if media.encoding in AUDIO_CODECS:
            try:
                client.setup(media)
            except LiveError as error:
                log.warning("%s: audio is disabled: %s", redact(address.url), error.message)
                return None
            return media
    if offered:
        held = ", ".join(media.encoding or "unknown" for media in offered)
        log.warning("%s: audio is disabled, because its codec %s is not supported", redact(address.url), held)
    return None


def _video(medias: list[Media], address: RtspAddress) -> Media:
    """Return the first H.264 or H.265 video stream. Raise LiveError or UnhandledCodecError if there is none."""
    videos = [media for media in medias if media.kind == "video"]
    if not videos:
        held = ", ".join(sorted({media.kind for media in medias if media.kind})) or "nothing"
        raise LiveError("codec unsupported", f"{redact(address.url)} has no video (it offers {held})")
    for media in videos:
        if media.encoding in CODECS:
            return media
    raise UnhandledCodecError(address)
