"""Source for `onvif://` URLs: the camera's video, PTZ presets and signals such as motion."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from saccade.sources.errors import SourceError
from saccade.sources.live.source import LiveSource, Opener
from saccade.sources.network.dialer import CheckAddress, Dialer
from saccade.sources.onvif.device import OnvifAddress, ask_device, checked_address, profiles_of
from saccade.sources.onvif.signals import CameraSignals

T = TypeVar("T")

_PTZ = "http://www.onvif.org/ver20/ptz/wsdl"


class PtzError(SourceError):
    """Raised if a camera cannot be moved: it does not support PTZ, or the preset does not exist."""


@dataclass(slots=True, frozen=True)
class Preset:
    """A PTZ preset: a camera position that is stored in the camera.

    Attributes:
        token: identifier of the position.
        name: name of the position; "" if it has none.
    """

    token: str
    name: str


class OnvifSource(LiveSource):
    """A live source of an ONVIF camera, with the camera's PTZ presets, motion detection and digital inputs.

    Args:
        url, opener, stream, vid_stride, retry: see `LiveSource`.
        check: raises SourceError for a forbidden address; None to allow any address.
    """

    def __init__(
        self, url: str, opener: Opener, *, stream: str, vid_stride: int, retry: bool, check: CheckAddress | None
    ) -> None:
        super().__init__(url, opener, stream=stream, vid_stride=vid_stride, retry=retry)
        self._address = OnvifAddress.parse(url)
        self._check = check
        self._signals = CameraSignals(stream, self._closed, partial(self._ask_device, limit_s=None))

    def signals(self) -> frozenset[str] | None:
        """Return the camera's active signals, such as "motion", or None if the camera's events cannot be received.

        The first call subscribes to the camera's events.
        """
        return self._signals.read()

    def presets(self) -> list[Preset]:
        """Ask the camera for its presets. Takes up to 15 s. Thread-safe.

        Raises:
            PtzError: if the camera does not support PTZ.
            LiveError: see `ask_device`.
        """
        return self._ask(_presets)

    def go_to(self, preset: str) -> None:
        """Move the camera to a PTZ preset. Returns when the camera has accepted the request. Thread-safe.

        Args:
            preset: token of the preset.

        Raises:
            PtzError: if the camera does not support PTZ, or the preset does not exist.
            LiveError: see `ask_device`.
        """

        async def turn(ptz: Any, profile: str) -> None:
            known = [one.token for one in await _presets(ptz, profile)]
            if preset not in known:
                raise PtzError(f"PTZ preset '{preset[:80]}' does not exist; available: {', '.join(known) or 'none'}")
            await ptz.GotoPreset({"ProfileToken": profile, "PresetToken": preset})

        self._ask(turn)

    def _ask(self, request: Callable[[Any, str], Coroutine[Any, Any, T]]) -> T:
        """Connect to the camera, and call `request` with its PTZ service and the token of a PTZ profile."""

        async def ask(device: Any) -> T:
            profiles = [profile for profile in await profiles_of(device) if profile.ptz]
            if not profiles or _PTZ not in device.xaddrs:
                raise PtzError("the camera does not support PTZ")
            named = [profile for profile in profiles if profile.token == self._address.token]
            return await request(await device.create_ptz_service(), (named or profiles)[0].token)

        return self._ask_device(ask)

    def _ask_device(self, ask: Callable[[Any], Coroutine[Any, Any, T]], **how: Any) -> T:
        address = checked_address(self._address, Dialer(self._closed, check=self._check))
        return ask_device(address, ask, there_only=self._check is not None, **how)


async def _presets(ptz: Any, profile: str) -> list[Preset]:
    found = await ptz.GetPresets({"ProfileToken": profile})
    return [Preset(str(one.token), str(one.Name or "")) for one in found or [] if one.token]
