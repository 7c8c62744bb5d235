"""The source policy: which paths, URLs and networks clients of the HTTP API can open as video sources.

    allow_sources: ["/srv/videos/*.mp4", "rtsp://camera-*.example.org/*", 192.168.7.0/24]

A path is allowed if its resolved form, without symbolic links, matches a glob pattern of the list. `*` matches `/`.

A URL is allowed in two cases:
    1. The host is in a network of the list.
    2. The URL without user name and query matches a glob pattern. If the host part of the pattern has a wildcard, the
       host must also have a public address. This prevents DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from urllib.parse import parse_qs, urlsplit

from saccade.addresses import with_plain_zone
from saccade.lookups import look_up
from saccade.pipeline.errors import ConfigError
from saccade.sources import SourceError
from saccade.sources.urls import RtspAddress
from saccade.web.tokens import is_loopback

_HOST = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]+(%[\w.~-]+)?")
_NOT_ALLOWED = "the HTTP API may not open this source; add it to allow_sources to permit it"
_GLOB = re.compile(r"[*?\[]")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class NotAllowedError(SourceError):
    """Raised if the source policy rejects a source. The message does not include the reason."""

    def __init__(self, line: str = _NOT_ALLOWED) -> None:
        super().__init__(line)


class SourcePolicy:
    """Decides which video sources the clients of an HTTP server can open.

    Args:
        allowed: glob patterns of paths and URLs, and networks such as 192.168.7.0/24.
        open_by_default: whether an empty list allows every source, except sources that listen on a port. If False, an
            empty list allows no source. True is safe only if the server accepts only requests from this machine.

    Raises:
        ConfigError: if an entry is empty or an invalid network.
    """

    def __init__(self, allowed: Sequence[str], *, open_by_default: bool) -> None:
        self._networks: list[Network] = []
        self._addresses: list[str] = []
        self._paths: list[str] = []
        self.restricted = bool(allowed) or not open_by_default
        for entry in allowed:
            if network := _network(entry):
                self._networks.append(network)
            elif "://" in entry or entry.startswith("webrtc:"):
                self._addresses.append(entry)
            elif re.fullmatch(r"[\d.:a-fA-F]+/\d+", entry):
                raise ConfigError(f"allow_sources: {entry} is not a valid network; write for example 192.168.7.0/24")
            else:
                self._paths.append(_resolved_glob(entry))

    def check(self, source: str, addresses: Sequence[IpAddress] | None = None) -> None:
        """Check that a client is allowed to open a source.

        Args:
            source: path or URL.
            addresses: resolved IP addresses of the host. If None, the host name is resolved, which can take seconds.

        Raises:
            NotAllowedError: if the policy rejects the source.
            SourceError: if the URL is malformed.
        """
        source = with_plain_zone(source)
        live = "://" in source or source.startswith("webrtc:")
        if live and _listens(source) and not is_loopback(_host(source)):
            if not self._names(source):  # the source opens a port without authentication
                raise NotAllowedError
        elif self.restricted and not (self._address_allowed(source, addresses) if live else self._path_allowed(source)):
            raise NotAllowedError

    def _path_allowed(self, source: str) -> bool:
        path = source if source.isdecimal() else os.path.realpath(source)  # a webcam is a number
        return any(fnmatchcase(path, glob) for glob in self._paths)

    def _address_allowed(self, source: str, addresses: Sequence[IpAddress] | None) -> bool:
        if source.startswith("webrtc:"):
            return self._names(source)
        host = _host(source)
        globs = [glob for glob in self._addresses if _matches(source, glob)]
        if any(not _GLOB.search(_authority(glob)) for glob in globs):
            return True
        addresses = _resolve(host) if addresses is None else addresses
        in_network = all(any(address in network for network in self._networks) for address in addresses)
        public = all(address.is_global and not address.is_multicast for address in addresses)
        return bool(addresses) and (in_network or (bool(globs) and public))

    def _names(self, source: str) -> bool:
        return any(_matches(source, glob) for glob in self._addresses)


def _network(entry: str) -> Network | None:
    with suppress(ValueError):
        return ipaddress.ip_network(entry, strict=False)
    return None


def _resolved_glob(entry: str) -> str:
    """Make a glob pattern of paths absolute. Symbolic links before the first wildcard are resolved."""
    if entry.isdecimal():
        return entry
    parts = os.path.abspath(entry).split(os.sep)
    first = next((number for number, part in enumerate(parts) if _GLOB.search(part)), len(parts))
    return os.path.join(os.path.realpath(os.sep.join(parts[:first]) or os.sep), *parts[first:])


def _authority(address: str) -> str:
    """Return the host and port of a URL, with the same rules as FFmpeg."""
    return re.split(r"[/?#]", address.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]


def _host(source: str) -> str:
    """Return the host in the URL of a live source.

    Raises:
        SourceError: if the host is missing or ambiguous.
    """
    if source.startswith("webrtc:"):
        rest = source.removeprefix("webrtc:")
        return urlsplit(rest).hostname or "127.0.0.1" if rest.startswith("//") else "127.0.0.1"
    if source.lower().startswith(("rtsp://", "rtsps://")):
        return RtspAddress.parse(source).host
    authority = _authority(source)
    with suppress(ValueError):
        host = urlsplit(f"//{authority}").hostname or ""
        if not host and _listens(source):
            return "0.0.0.0"
        if _HOST.fullmatch(host):
            return host
    raise SourceError("the host in the source address is missing or invalid")


def _listens(source: str) -> bool:
    scheme, _, rest = source.partition("://")
    options = parse_qs(rest.partition("?")[2], keep_blank_values=True)
    # FFmpeg treats the option without a value as yes.
    listening = options.get("listen", ["0"]) != ["0"] or options.get("mode", [""])[-1] == "listener"
    return scheme.lower() == "udp" or listening


def _matches(source: str, glob: str) -> bool:
    scheme, separator, rest = source.partition("://")
    if not separator:
        return fnmatchcase(source, glob)
    authority = _authority(source)
    path = re.split(r"[?#]", rest, maxsplit=1)[0].rpartition(authority)[2]
    return fnmatchcase(f"{scheme.lower()}://{authority.lower()}{path}", glob)


def _resolve(host: str) -> list[IpAddress]:
    with suppress(OSError, UnicodeError, ValueError):
        found = look_up(host)
        return [ipaddress.ip_address(str(place[4][0]).partition("%")[0]) for place in found]
    return []
