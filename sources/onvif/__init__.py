"""ONVIF cameras: discovery, profiles, stream URIs, PTZ presets and events. Reading profiles needs the extra `onvif`."""

from saccade.sources.onvif.device import OnvifAddress, Profile, best_profile, largest_profile, read_profiles
from saccade.sources.onvif.discovery import DiscoveredDevice, discover
from saccade.sources.onvif.source import OnvifSource, Preset, PtzError

__all__ = [
    "DiscoveredDevice",
    "OnvifAddress",
    "OnvifSource",
    "Preset",
    "Profile",
    "PtzError",
    "best_profile",
    "discover",
    "largest_profile",
    "read_profiles",
]
