"""The command `saccade discover`: lists the ONVIF cameras on the network, and their profiles (video streams)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from saccade.sources import SourceError
from saccade.sources.onvif import DiscoveredDevice, OnvifAddress, Profile, best_profile, discover, read_profiles
from saccade.sources.onvif.discovery import GROUP


@dataclass(slots=True, frozen=True)
class FoundCamera:
    """A camera that responded to the ONVIF discovery.

    Attributes:
        device: address and name of the camera.
        source: URL that opens the camera, without credentials.
        profiles: video streams of the camera; empty without a valid user name.
        chosen: token of the profile that `source` opens; empty without profiles.
        problem: reason why no profiles were found; otherwise empty.
    """

    device: DiscoveredDevice
    source: str
    profiles: tuple[Profile, ...]
    chosen: str
    problem: str


@dataclass(slots=True, frozen=True)
class FoundCameras:
    """All cameras that responded to the ONVIF discovery."""

    cameras: tuple[FoundCamera, ...]

    def as_json(self) -> str:
        """Return the discovered cameras as a JSON array."""
        return json.dumps([asdict(camera) for camera in self.cameras], indent=2)

    def as_text(self) -> str:
        """Return one line per camera, and one line per profile (video stream)."""
        lines = (
            []
            if self.cameras
            else ["no ONVIF camera answered; check that the camera is on this network and that ONVIF is enabled"]
        )
        for camera in self.cameras:
            named = ", ".join(filter(None, (camera.device.name, camera.device.hardware)))
            lines.append(f"{camera.source}  {named}".rstrip())
            for profile in camera.profiles:
                rate = f", {profile.fps:g} fps" if profile.fps else ""
                mark = "*" if profile.token == camera.chosen else " "
                size = f"{profile.codec} {profile.width}x{profile.height}{rate}"
                lines.append(f" {mark} /{profile.token}  {size}  {profile.uri}")
            if camera.problem:
                lines.append(f"   {camera.problem}")
        return "\n".join(lines)


def find_cameras(
    seconds: float, user: str | None, password: str | None, group: tuple[str, int] = GROUP
) -> FoundCameras:
    """Search the network for ONVIF cameras. With a user name, also list the profiles (video streams) of each camera.

    Args:
        seconds: how long to wait for responses, in seconds.
        user: user name of the cameras, or None.
        password: password of the cameras, or None.
        group: multicast address and port of WS-Discovery.

    Raises:
        SourceError: if the network cannot be searched.
    """
    try:
        devices = discover(seconds, group)
    except OSError as error:
        raise SourceError(f"cannot search the network for cameras: {error.strerror or error}") from error
    return FoundCameras(tuple(_camera(device, user, password) for device in devices))


def _camera(device: DiscoveredDevice, user: str | None, password: str | None) -> FoundCamera:
    port = "" if device.port == 80 else f":{device.port}"
    source = f"onvif://{f'[{device.host}]' if ':' in device.host else device.host}{port}"
    profiles: list[Profile] = []
    problem = ""
    if user is not None:
        try:
            profiles = read_profiles(OnvifAddress(device.host, device.port, user, password or "", ""))
        except SourceError as error:
            problem = str(error)
    chosen = best_profile(profiles).token if profiles else ""
    return FoundCamera(device, source, tuple(profiles), chosen, problem)
