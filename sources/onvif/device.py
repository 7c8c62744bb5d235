"""Reads an ONVIF device's media profiles and stream URIs, and selects a profile for the model.

The older ONVIF service Media lists H.264 profiles; Media2 lists H.265 profiles too. This module builds the Media2
requests, because the package `onvif-zeep-async` does not support Media2.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from xml.sax.saxutils import escape

from saccade.distribution import install_command
from saccade.lookups import run
from saccade.sources.errors import LiveError, SourceError
from saccade.sources.network.dialer import Dialer
from saccade.sources.urls import RtspAddress, redact

T = TypeVar("T")
log = logging.getLogger(__name__)

_TIMEOUT_S = 15.0
_WANTED_PIXELS = 1280 * 720  # more pixels cost decoding time, and the crops of 378 pixels show no more detail
_CODECS = ("H264", "H265")
_MEDIA2 = "http://www.onvif.org/ver20/media/wsdl"
_ENVELOPE = (
    f'<s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope" xmlns:m="{_MEDIA2}">'
    "<s:Header/><s:Body>{}</s:Body></s:Envelope>"
)


@dataclass(slots=True, frozen=True)
class Profile:
    """One media profile (stream) that an ONVIF device offers.

    Attributes:
        name, token: name and identifier of the profile.
        codec: codec of the stream, such as "H264"; "" if unknown.
        width, height: size in pixels; 0 if unknown.
        fps: highest number of frames per second; None if unknown.
        key_interval: number of frames between two keyframes; None if unknown.
        uri: stream URI, without credentials.
        ptz: whether the profile supports PTZ (pan, tilt, zoom).
    """

    name: str
    token: str
    codec: str
    width: int
    height: int
    fps: float | None
    key_interval: int | None
    uri: str
    ptz: bool = False


@dataclass(slots=True, frozen=True)
class OnvifAddress:
    """A parsed ONVIF URL `onvif://user:password@host:port/TOKEN`. The port and the profile's token are optional.

    Attributes:
        host, port: host and port of the device service.
        user, password: decoded credentials; None if the URL has none.
        token: token of the profile; "" to choose the best profile.
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
        """Parse an ONVIF URL.

        Raises:
            SourceError: if the URL is malformed.
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
        """URL of the ONVIF device service, without credentials."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/onvif/device_service"

    def stream(self, profile: Profile) -> RtspAddress:
        """Return the RTSP address of a media profile, with the device's credentials.

        Raises:
            SourceError: if the device reports a malformed URI.
        """
        address = RtspAddress.parse(profile.uri)
        return address if address.user is not None else replace(address, user=self.user, password=self.password)


def best_profile(profiles: list[Profile]) -> Profile:
    """Return the media profile that suits the model best: preferably H.264 or H.265, near 1280 × 720 pixels."""

    def distance(profile: Profile) -> tuple[bool, float]:
        pixels = profile.width * profile.height
        return profile.codec not in _CODECS, abs(math.log(pixels / _WANTED_PIXELS)) if pixels else math.inf

    return min(profiles, key=distance)


def largest_profile(profiles: list[Profile]) -> Profile:
    """Return the H.264 or H.265 profile with the largest image. If there is none, consider all profiles."""
    return max(profiles, key=lambda profile: (profile.codec in _CODECS, profile.width * profile.height))


def checked_address(address: OnvifAddress, dialer: Dialer) -> OnvifAddress:
    """Return the address of an ONVIF device. If the dialer checks addresses, its host is an allowed IP address.

    Raises:
        LiveError: if the host cannot be resolved.
        SourceError: if the address is forbidden.
    """
    return address if dialer.check is None else replace(address, host=dialer.look_up(address.url, address.host)[0])


def read_profiles(address: OnvifAddress, *, there_only: bool = False) -> list[Profile]:
    """Read all media profiles of an ONVIF device.

    Args:
        address: address of the device.
        there_only: whether to send all requests to this address, even if the device reports other addresses.

    Raises:
        SourceError: if the extra `onvif` is not installed.
        LiveError: if the device does not answer, rejects the password, or has no video.
    """
    profiles = ask_device(address, profiles_of, there_only=there_only)
    if not profiles:
        raise LiveError("not found", f"{address.host}:{address.port} offers no video")
    return profiles


def ask_device(
    address: OnvifAddress,
    ask: Callable[[Any], Coroutine[Any, Any, T]],
    *,
    there_only: bool = False,
    limit_s: float | None = _TIMEOUT_S,
) -> T:
    """Connect to an ONVIF device, and return the result of the coroutine function `ask`.

    Args:
        address: address of the device.
        ask: coroutine function that is called with the connected `onvif.ONVIFCamera` and sends requests.
        there_only: whether to send all requests to this address, even if the device reports other addresses.
        limit_s: time limit in seconds; None for no limit.

    Raises:
        SourceError: if the extra `onvif` is not installed.
        LiveError: if the device does not answer, rejects the password, or answers with a SOAP fault.
    """
    try:
        import onvif  # an extra
    except ImportError:
        raise SourceError(f"onvif:// needs the optional dependency `onvif`: {install_command('onvif')}") from None

    async def connect() -> T:
        # The digest of the password depends on the device's clock, which may be wrong. The cache has an asyncio lock,
        # on which the event loops of two streams can wait for each other.
        options = {"adjust_time": True, "nat_override": there_only, "no_cache": True}
        device = onvif.ONVIFCamera(address.host, address.port, address.user, address.password, **options)
        try:
            await device.update_xaddrs()
            return await ask(device)
        finally:
            await device.close()

    try:
        return run(asyncio.wait_for(connect(), limit_s))
    except SourceError:
        raise
    except (TimeoutError, OSError) as error:
        raise LiveError("timeout", f"{address.host}:{address.port} does not answer as an ONVIF device") from error
    except Exception as error:  # zeep and httpx raise a dozen kinds
        text = " ".join(f"{type(error).__name__} {error}".split())
        if any(word in text.lower() for word in ("notauthorized", "not authorized", "unauthorized", "401")):
            refused = address.user is not None
            raise LiveError("auth failed", "the device rejects the user name or password", refused=refused) from error
        shown = redact(text)[:200]
        raise LiveError("connection failed", f"{address.host}:{address.port}: {shown}") from error


async def profiles_of(device: Any) -> list[Profile]:
    """Read the media profiles of a connected ONVIF device, with the service Media2 or, if that fails, Media."""
    if url := device.xaddrs.get(_MEDIA2):
        try:
            if found := await _read_media2(device, url):
                return found
        except Exception as error:  # the same request to Media shows what is wrong
            log.debug("%s: Media2 failed: %s", device.host, type(error).__name__)
    return await _read_media(device)


async def _read_media2(device: Any, url: str) -> list[Profile]:
    """Read the profiles of a connected ONVIF device through its service Media2 at the address `url`."""
    from zeep.loader import parse_xml  # installed with the extra

    service = await device.create_devicemgmt_service()  # for its connections and its credentials
    client = service.zeep_client

    async def ask(request: str) -> Any:
        envelope, headers = client.wsse.apply(parse_xml(_ENVELOPE.format(request), service.transport), {})
        headers["Content-Type"] = "application/soap+xml; charset=utf-8"
        reply = await service.transport.post_xml(url, envelope, headers)
        return parse_xml(reply.content, service.transport, settings=client.settings)

    root = await ask("<m:GetProfiles><m:Type>VideoEncoder</m:Type><m:Type>PTZ</m:Type></m:GetProfiles>")
    profiles = []
    for one in root.iter(f"{{{_MEDIA2}}}Profiles"):
        encoder = one.find("{*}Configurations/{*}VideoEncoder")
        token = one.get("token", "")
        if encoder is None:
            continue
        which = f"<m:Protocol>RtspUnicast</m:Protocol><m:ProfileToken>{escape(token)}</m:ProfileToken>"
        uri = (await ask(f"<m:GetStreamUri>{which}</m:GetStreamUri>")).findtext(".//{*}Uri")
        fps, interval = encoder.findtext("{*}RateControl/{*}FrameRateLimit"), encoder.get("GovLength")
        if uri:
            profiles.append(
                Profile(
                    name=one.findtext("{*}Name", token),
                    token=token,
                    codec=encoder.findtext("{*}Encoding", "").upper(),
                    width=int(encoder.findtext("{*}Resolution/{*}Width") or 0),
                    height=int(encoder.findtext("{*}Resolution/{*}Height") or 0),
                    fps=float(fps or 0) or None,
                    key_interval=int(interval or 0) or None,
                    uri=uri.strip(),
                    ptz=one.find("{*}Configurations/{*}PTZ") is not None,
                )
            )
    return [profile for profile in profiles if profile.codec]


async def _read_media(device: Any) -> list[Profile]:
    """Read the media profiles of a connected ONVIF device with the older service Media."""
    media = await device.create_media_service()
    found = []
    for profile in await media.GetProfiles():
        if getattr(profile, "VideoEncoderConfiguration", None) is None:
            continue
        setup = {"StreamSetup": {"Stream": "RTP-Unicast", "Transport": {"Protocol": "RTSP"}}}
        reply = await media.GetStreamUri({**setup, "ProfileToken": profile.token})
        found.append(_profile(profile, str(reply.Uri)))
    return [profile for profile in found if profile.codec]


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
        ptz=getattr(profile, "PTZConfiguration", None) is not None,
    )
