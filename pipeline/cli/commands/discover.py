"""`saccade discover`: the ONVIF cameras on the network, with their profiles."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from saccade.sources import SourceError
from saccade.sources.onvif import DiscoveredDevice, OnvifAddress, Profile, best_profile, discover, read_profiles
from saccade.sources.onvif.discovery import GROUP


@dataclass(slots=True, frozen=True)
class FoundCamera:
    """A camera that answered.

    Attributes:
        device: where it is, and what it is called.
        source: what to open it with, without credentials.
        profiles: its streams; empty when no user was given, or it refuses.
        chosen: token of the profile that `source` opens; "" when there are none.
        problem: why there are no profiles; "" when there are.
    """

    device: DiscoveredDevice
    source: str
    profiles: tuple[Profile, ...]
    chosen: str
    problem: str


@dataclass(slots=True, frozen=True)
class FoundCameras:
    """All cameras that answered."""

    cameras: tuple[FoundCamera, ...]

    def as_json(self) -> str:
        """The cameras as a JSON array."""
        return json.dumps([asdict(camera) for camera in self.cameras], indent=2)

    def as_text(self) -> str:
        """A line for each camera and each profile."""
        lines = [] if self.cameras else ["no ONVIF camera answered; is it in this network, and ONVIF switched on?"]
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
    """Probe the network for `seconds` seconds; with `user`, ask each camera for its profiles as well.

    Raises:
        SourceError: if the network cannot be probed.
    """
    try:
        devices = discover(seconds, group)
    except OSError as error:
        raise SourceError(f"the network cannot be probed: {error.strerror or error}") from error
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
