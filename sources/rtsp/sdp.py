"""Parser for session descriptions (SDP, RFC 4566); reads only what playing video and audio needs."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from urllib.parse import urljoin

from saccade.sources.rtp.nal import START_CODE
from saccade.sources.rtsp.mikey import crypto_of

_STATIC_TYPES = {0: "PCMU", 8: "PCMA", 9: "G722", 26: "JPEG", 31: "H261", 32: "MPV", 33: "MP2T", 34: "H263"}
_MAX_RATE = 1000.0
_MOST_TYPES = 32


@dataclass(slots=True)
class Media:
    """One media stream of a session description (SDP).

    Attributes:
        kind: media type, such as "video" or "audio".
        profile: RTP profile, such as "RTP/AVP".
        payload_type: RTP payload type.
        encoding: codec name in capitals, such as "H264"; "" if not stated.
        control: URL for SETUP.
        parameters: parameters of `a=fmtp`, with keys in lower case.
        rate: video frame rate in frames per second; None if not stated.
        crypto: SRTP keys as `a=crypto` values without tags. Keys from `a=key-mgmt` are converted.
        feedback: RTCP feedback that the server accepts, such as "nack pli".
        clock: rate of the RTP clock in Hz; 0 if not stated.
        channels: number of audio channels.
    """

    kind: str
    profile: str
    payload_type: int
    encoding: str = ""
    control: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    rate: float | None = None
    crypto: list[str] = field(default_factory=list)
    feedback: list[str] = field(default_factory=list)
    clock: int = 0
    channels: int = 1

    @property
    def parameter_sets(self) -> bytes:
        """H.264 or H.265 parameter sets from the SDP, with start codes; b"" if the SDP contains none."""
        keys = ("sprop-vps", "sprop-sps", "sprop-pps", "sprop-parameter-sets")
        sets = [text for key in keys for text in self.parameters.get(key, "").split(",") if text]
        data = b""
        for text in sets:
            try:
                decoded = base64.b64decode(text)
            except (binascii.Error, ValueError):
                continue  # those in the stream itself will do
            data += decoded if decoded.startswith(b"\0\0") else START_CODE + decoded
        return data


@dataclass(slots=True)
class Session:
    """A parsed session description (SDP).

    Attributes:
        control: URL of the whole session, for PLAY.
        medias: media streams of the session.
    """

    control: str
    medias: list[Media]


def parse_sdp(text: str, base: str) -> Session:
    """Parse a session description (SDP). Malformed lines are ignored.

    A media description with several payload types becomes one `Media` for each payload type.

    Args:
        text: the session description.
        base: URL that relative URLs are appended to.
    """
    medias: list[Media] = []
    described = 0  # number of the last medias that the current `m=` line describes
    session_control = ""
    session_keys: list[str] = []
    for line in text.splitlines():
        key, _, value = line.strip().partition("=")
        name, _, rest = value.partition(":")
        if key == "m":
            words = value.split()
            types = [int(word) for word in words[3:] if re.fullmatch(r"[0-9]{1,3}", word)][:_MOST_TYPES] or [-1]
            profile = words[2].upper() if len(words) > 2 else ""
            medias += [Media(words[0] if words else "", profile, one, _STATIC_TYPES.get(one, "")) for one in types]
            described = len(types)
        elif key == "a" and name == "control" and not medias:
            session_control = rest.strip()
        elif key == "a" and name == "key-mgmt" and not medias:
            session_keys += _mikey(rest)
        elif key == "a" and medias:
            for media in medias[-described:]:
                _read_attribute(media, name, rest.strip())
    whole = base if session_control in ("", "*") else _join_session(base, session_control)
    for media in medias:
        media.control = _join(whole, media.control)
        media.crypto += session_keys
    return Session(whole, medias)


def _read_attribute(media: Media, name: str, value: str) -> None:
    if name == "control":
        media.control = value
    elif name == "framerate":
        match = re.match(r"\d{1,9}(\.\d{1,9})?", value)
        rate = float(match[0]) if match else 0.0
        media.rate = rate if 0 < rate <= _MAX_RATE else None
    elif name == "crypto":
        media.crypto.append(value.partition(" ")[2].strip())
    elif name == "key-mgmt":
        media.crypto += _mikey(value)
    elif name == "rtcp-fb":
        number, _, kind = value.partition(" ")
        if number in ("*", str(media.payload_type)):
            media.feedback.append(kind.strip().lower())
    elif name in ("rtpmap", "fmtp"):
        number, _, rest = value.partition(" ")
        if number != str(media.payload_type):
            return
        if name == "rtpmap":
            encoding, clock, channels, *_ = [*rest.strip().split("/"), "", ""]
            media.encoding = encoding.upper()
            media.clock = int(clock) if re.fullmatch(r"[0-9]{1,6}", clock) else 0
            media.channels = int(channels) if re.fullmatch("[1-8]", channels) else 1
        else:
            pairs = (item.strip().partition("=") for item in rest.split(";"))
            media.parameters |= {key.strip().lower(): setting.strip() for key, _, setting in pairs if key}


def _mikey(value: str) -> list[str]:
    """Return a list with the SRTP key of an `a=key-mgmt` value, or an empty list if the value is unusable."""
    protocol, _, text = value.strip().partition(" ")
    try:
        return [crypto_of(base64.b64decode(text.strip().strip('"')))] if protocol == "mikey" else []
    except (binascii.Error, ValueError):
        return []


def _join_session(base: str, control: str) -> str:
    try:
        return urljoin(base, control)
    except ValueError:
        return base


def _join(base: str, control: str) -> str:
    """Return a control URL. A relative URL is appended to `base` after a slash, as RTSP servers expect."""
    if "://" in control:
        return control
    if control in ("", "*"):
        return base
    return f"{base.rstrip('/')}/{control.lstrip('/')}"
