"""Zones of IPv6 addresses, which name the network card of a link-local address. Pure text, for sources and sinks."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"(\[[0-9A-Fa-f:.]+%)25([^\]%/@\s]+\])")  # %25 alone is the zone of number 25
_ZONE = re.compile(r"(\[[0-9A-Fa-f:.]+)%[^\]/@\s]*\]")


def with_plain_zone(url: str) -> str:
    """An address as the system and FFmpeg take it: `[fe80::1%eth0]`, also where it has `%25`, as RFC 6874 has it."""
    return _ESCAPED.sub(r"\1\2", url)


def without_zone(url: str) -> str:
    """An address as it is sent to a server, to which the zone means nothing."""
    return _ZONE.sub(r"\1]", url)
