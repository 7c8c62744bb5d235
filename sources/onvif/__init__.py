"""ONVIF cameras: discovery, profiles and stream URIs. Reading profiles needs the extra `onvif`."""

from saccade.sources.onvif.device import OnvifAddress, Profile, best_profile, largest_profile, read_profiles
from saccade.sources.onvif.discovery import DiscoveredDevice, discover

__all__ = [
    "DiscoveredDevice",
    "OnvifAddress",
    "Profile",
    "best_profile",
    "discover",
    "largest_profile",
    "read_profiles",
]
