"""IPv6 zone IDs in URLs. A zone ID, such as %eth0, names the network interface of a link-local address."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"(\[[0-9A-Fa-f:.]+%)25([^\]%/@\s]+\])")  # %25 alone is the zone of number 25
_ZONE = re.compile(r"(\[[0-9A-Fa-f:.]+)%[^\]/@\s]*\]")


def with_plain_zone(url: str) -> str:
    """Convert the IPv6 zone ID in a URL from `%25eth0` (RFC 6874) to `%eth0`, as the system and FFmpeg expect."""
    return _ESCAPED.sub(r"\1\2", url)


def without_zone(url: str) -> str:
    """Remove the IPv6 zone from a URL, because a zone is meaningful only on this machine."""
    return _ZONE.sub(r"\1]", url)
