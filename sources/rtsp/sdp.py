"""The part of a session description (SDP, RFC 4566) that a receiver of video needs.

Pure text. Knows nothing of connections.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from urllib.parse import urljoin

from saccade.sources.rtp.nal import START_CODE

_STATIC_TYPES = {26: "JPEG", 31: "H261", 32: "MPV", 33: "MP2T", 34: "H263"}


@dataclass(slots=True)
class Media:
    """One stream of a session.

    Attributes:
        kind: "video", "audio", …
        payload_type: RTP payload type.
        encoding: name of the format in capitals, such as "H264"; "" when not said.
        control: address to set the stream up with.
        parameters: what `a=fmtp` says, keys in lower case.
        rate: frames a second, if said.
    """

    kind: str
    payload_type: int
    encoding: str = ""
    control: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    rate: float | None = None

    @property
    def parameter_sets(self) -> bytes:
        """Parameter sets of H.264 or H.265, each behind a start code; empty when they come with the frames."""
        keys = ("sprop-vps", "sprop-sps", "sprop-pps", "sprop-parameter-sets")
        sets = [text for key in keys for text in self.parameters.get(key, "").split(",") if text]
        data = b""
        for text in sets:
            try:
                data += START_CODE + base64.b64decode(text)
            except (binascii.Error, ValueError):
                continue  # what is in the stream itself will do
        return data


def parse_sdp(text: str, base: str) -> list[Media]:
    """Read a description; `base` is the address that relative ones in it are relative to. Never raises."""
    medias: list[Media] = []
    session_control = ""
    for line in text.splitlines():
        key, _, value = line.strip().partition("=")
        name, _, rest = value.partition(":")
        if key == "m":
            words = value.split()
            kind = int(words[3]) if len(words) > 3 and words[3].isdecimal() else -1
            medias.append(Media(words[0] if words else "", kind, _STATIC_TYPES.get(kind, "")))
        elif key == "a" and name == "control" and not medias:
            session_control = rest.strip()
        elif key == "a" and medias:
            _attribute(medias[-1], name, rest.strip())
    whole = base if session_control in ("", "*") else urljoin(base, session_control)
    for media in medias:
        media.control = _join(whole, media.control)
    return medias


def _attribute(media: Media, name: str, value: str) -> None:
    if name == "control":
        media.control = value
    elif name == "framerate":
        match = re.match(r"\d+(\.\d+)?", value)
        media.rate = float(match[0]) if match else None
    elif name in ("rtpmap", "fmtp"):
        number, _, rest = value.partition(" ")
        if number != str(media.payload_type):
            return
        if name == "rtpmap":
            media.encoding = rest.strip().partition("/")[0].upper()
        else:
            pairs = (item.strip().partition("=") for item in rest.split(";"))
            media.parameters |= {key.strip().lower(): setting.strip() for key, _, setting in pairs if key}


def _join(base: str, control: str) -> str:
    """As servers mean it: a control address is put behind the base with a slash, whatever a URL library would do."""
    if "://" in control:
        return control
    if control in ("", "*"):
        return base
    return f"{base.rstrip('/')}/{control}"
