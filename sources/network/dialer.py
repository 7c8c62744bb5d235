"""Opens the network connections of sources: resolves a host once, checks its IP addresses and connects to them.

Resolving the host a second time would allow DNS rebinding: the name could then resolve to a forbidden address.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from saccade.lookups import look_up
from saccade.sources.errors import LiveError
from saccade.sources.network.stream_socket import HttpProxy, StreamSocket
from saccade.sources.network.tls import TlsPolicy

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

CheckAddress = Callable[[str, Sequence[IpAddress]], None]
"""Called before each connection with the URL and its host's IP addresses. Raises `SourceError` to forbid an address."""


@dataclass(slots=True, frozen=True)
class Dialer:
    """Resolves hosts, checks their IP addresses and opens TCP and TLS connections.

    Attributes:
        closed: event; setting it aborts all blocking calls.
        tls: which server certificates to accept.
        check: raises SourceError for a forbidden address; None to allow any address.
    """

    closed: threading.Event
    tls: TlsPolicy = field(default_factory=TlsPolicy)
    check: CheckAddress | None = None

    def look_up(self, url: str, host: str) -> list[str]:
        """Resolve a host to IP addresses, and check that connections for `url` to these addresses are allowed.

        Raises:
            LiveError: if the host cannot be resolved.
            SourceError: if `check` forbids an address.
        """
        try:
            found = look_up(host, cancelled=self.closed)
        except (OSError, UnicodeError) as error:
            self.allow(url, [])  # a refusal must not depend on name resolution
            if isinstance(error, TimeoutError):
                raise LiveError("timeout", str(error)) from None
            raise LiveError("connection failed", f"no such host: {host}") from error
        numeric = list(dict.fromkeys(_with_zone(place[4]) for place in found))
        self.allow(url, numeric)
        return numeric

    def allow(self, url: str, numeric: Sequence[str]) -> None:
        """Raise SourceError if the user's address policy (`check`) forbids these IP addresses for `url`."""
        if self.check is not None:
            self.check(url, ip_addresses(numeric))

    def connect(self, url: str, host: str, port: int, *, secure: bool, proxy: HttpProxy | None = None) -> StreamSocket:
        """Open a connection for `url`, with TLS if `secure` is True.

        The proxy is not used if `check` is set, because the proxy would resolve the host itself.

        Raises:
            LiveError: if the connection cannot be opened.
            SourceError: if `check` forbids the address.
        """
        tls = self.tls if secure else None
        if proxy is not None and self.check is None:
            return StreamSocket(host, port, self.closed, tls, self.look_up(url, proxy.host), proxy)
        return StreamSocket(host, port, self.closed, tls, self.look_up(url, host))


def _with_zone(place: tuple[Any, ...]) -> str:
    """Return the IP address of a socket address, with its IPv6 zone such as `%eth0`."""
    zone = place[3] if len(place) > 3 else 0
    return f"{str(place[0]).partition('%')[0]}%{zone}" if zone else str(place[0])


def ip_addresses(numeric: Sequence[str]) -> list[IpAddress]:
    """Parse IP addresses. The zone of a link-local address is removed; invalid text is skipped."""
    found = []
    for text in numeric:
        with suppress(ValueError):
            found.append(ipaddress.ip_address(text.partition("%")[0]))
    return found
