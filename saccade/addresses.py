"""IPv6 zones, which name the network interface of a link-local address."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"(\[[0-9A-Fa-f:.]+%)25([^\]%/@\s]+\])")  # %25 alone is the zone of number 25
_ZONE = re.compile(r"(\[[0-9A-Fa-f:.]+)%[^\]/@\s]*\]")


def with_plain_zone(url: str) -> str:
    """Write the zone of an address as the system and FFmpeg expect it: `[fe80::1%eth0]`, also for `%25` (RFC 6874)."""
    return _ESCAPED.sub(r"\1\2", url)


def without_zone(url: str) -> str:
    """Remove the zone from an address, since it has no meaning for a server."""
    return _ZONE.sub(r"\1]", url)
