"""An ONVIF device's profiles and stream URIs, through onvif-zeep-async, and which profile suits the model.

Knows nothing of frames.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any

from saccade.distribution import install_command
from saccade.lookups import run
from saccade.sources.errors import LiveError, SourceError
from saccade.sources.urls import RtspAddress, redact

_TIMEOUT_S = 15.0
_WANTED_PIXELS = 1280 * 720  # more is cut into crops of 378 pixels without seeing more, and costs decoding
_CODECS = ("H264", "H265")


@dataclass(slots=True, frozen=True)
class Profile:
    """One stream that a device offers.

    Attributes:
        name, token: what it is called, and its identifier.
        codec: such as "H264"; "" where it is not given.
        width, height: in pixels; 0 where they are not given.
        fps: frames a second, at most; None where it is not given.
        key_interval: frames from one key frame to the next; None where it is not given.
        uri: where it streams, without credentials.
    """

    name: str
    token: str
    codec: str
    width: int
    height: int
    fps: float | None
    key_interval: int | None
    uri: str


@dataclass(slots=True, frozen=True)
class OnvifAddress:
    """`onvif://user:password@host:port/TOKEN`; port and token of a profile may be left out.

    Attributes:
        host, port: of the device service.
        user, password: decoded; None when the URL holds none.
        token: the profile's; "" to choose the best.
    """

    host: str
    port: int
    user: str | None
    password: str | None
    token: str

    def __repr__(self) -> str:
        return f"OnvifAddress('{self.host}:{self.port}')"  # a traceback or log must not show the password

    @classmethod
    def parse(cls, text: str) -> OnvifAddress:
        """Take a URL apart.

        Raises:
            SourceError: if it is malformed.
        """
        try:
            address = RtspAddress.parse("rtsp" + text[text.index("://") :])
        except (SourceError, ValueError):
            raise SourceError(f"{redact(text)} is not an ONVIF address (onvif://user:password@host:80)") from None
        port = 80 if address.default_port else address.port
        token = address.url.partition("://")[2].partition("/")[2]
        return cls(address.host, port, address.user, address.password, token)

    @property
    def url(self) -> str:
        """The address of the device service, without credentials."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/onvif/device_service"

    def stream(self, profile: Profile) -> RtspAddress:
        """Where a profile streams, with the device's credentials.

        Raises:
            SourceError: if the device gives a malformed URI.
        """
        address = RtspAddress.parse(profile.uri)
        return address if address.user is not None else replace(address, user=self.user, password=self.password)


def best_profile(profiles: list[Profile]) -> Profile:
    """The profile nearest to what the model needs: H.264 or H.265, and about 1280 × 720."""

    def distance(profile: Profile) -> tuple[bool, float]:
        pixels = profile.width * profile.height
        return profile.codec not in _CODECS, abs(math.log(pixels / _WANTED_PIXELS)) if pixels else math.inf

    return min(profiles, key=distance)


def read_profiles(address: OnvifAddress, *, there_only: bool = False) -> list[Profile]:
    """What a device offers.

    Args:
        address: of the device.
        there_only: whether nothing but this host and port is asked, wherever the device says that its services are.

    Raises:
        SourceError: if the extra is not installed.
        LiveError: if the device does not answer, refuses the password, or offers nothing.
    """
    try:
        import onvif  # an extra
    except ImportError:
        raise SourceError(f"onvif:// needs an extra: {install_command('onvif')}") from None
    try:
        profiles = run(asyncio.wait_for(_read(onvif, address, there_only), _TIMEOUT_S))
    except (TimeoutError, OSError) as error:
        raise LiveError("timeout", f"{address.host}:{address.port} does not answer as an ONVIF device") from error
    except Exception as error:  # zeep and httpx raise a dozen kinds
        text = " ".join(f"{type(error).__name__} {error}".split())
        if any(word in text.lower() for word in ("notauthorized", "not authorized", "unauthorized", "401")):
            refused = address.user is not None
            raise LiveError("auth failed", "the device refuses user name or password", refused=refused) from error
        shown = redact(text)[:200]
        raise LiveError("connection failed", f"{address.host}:{address.port}: {shown}") from error
    if not profiles:
        raise LiveError("not found", f"{address.host}:{address.port} offers no video")
    return profiles


async def _read(onvif: Any, address: OnvifAddress, there_only: bool) -> list[Profile]:
    # Its clock may be off: the digest of the password depends on it.
    options = {"adjust_time": True, "nat_override": there_only}
    device = onvif.ONVIFCamera(address.host, address.port, address.user, address.password, **options)
    try:
        await device.update_xaddrs()
        media = await device.create_media_service()
        found = []
        for profile in await media.GetProfiles():
            setup = {"StreamSetup": {"Stream": "RTP-Unicast", "Transport": {"Protocol": "RTSP"}}}
            reply = await media.GetStreamUri({**setup, "ProfileToken": profile.token})
            found.append(_profile(profile, str(reply.Uri)))
        return [profile for profile in found if profile.codec]
    finally:
        await device.close()


def _profile(profile: Any, uri: str) -> Profile:
    encoder = getattr(profile, "VideoEncoderConfiguration", None)
    resolution, limits = getattr(encoder, "Resolution", None), getattr(encoder, "RateControl", None)
    codec = str(getattr(encoder, "Encoding", None) or "").upper()
    settings = getattr(encoder, "H264", None)
    fps = getattr(limits, "FrameRateLimit", None)
    interval = getattr(settings, "GovLength", None)
    return Profile(
        name=str(profile.Name),
        token=str(profile.token),
        codec=codec,
        width=int(getattr(resolution, "Width", 0) or 0),
        height=int(getattr(resolution, "Height", 0) or 0),
        fps=float(fps) if fps else None,
        key_interval=int(interval) if interval else None,
        uri=uri,
    )
