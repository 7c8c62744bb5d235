"""Opens the connections of a source: a host is looked up once, checked, and connected to where it was checked.

Looking it up a second time to connect would let a name lead elsewhere by then (DNS rebinding). Knows no protocols.
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
"""Called with an address before it is connected to, and with what its host was looked up to be. Raises `SourceError` to
refuse it."""


@dataclass(slots=True, frozen=True)
class Dialer:
    """Opens connections.

    Attributes:
        closed: ends every wait when set.
        tls: which certificates are accepted.
        check: refuses addresses; None to allow any.
    """

    closed: threading.Event
    tls: TlsPolicy = field(default_factory=TlsPolicy)
    check: CheckAddress | None = None

    def look_up(self, url: str, host: str) -> list[str]:
        """The numeric addresses of a host, once `check` allows them for `url`.

        Raises:
            LiveError: if there is no such host.
            SourceError: as `check`.
        """
        try:
            found = look_up(host, cancelled=self.closed)
        except (OSError, UnicodeError) as error:
            self.allow(url, [])  # which address is refused must not depend on names
            if isinstance(error, TimeoutError):
                raise LiveError("timeout", str(error)) from None
            raise LiveError("connection failed", f"no such host: {host}") from error
        numeric = list(dict.fromkeys(_with_zone(place[4]) for place in found))
        self.allow(url, numeric)
        return numeric

    def allow(self, url: str, numeric: Sequence[str]) -> None:
        """Have `url` checked as one that is reached at these addresses.

        Raises:
            SourceError: as `check`.
        """
        if self.check is not None:
            self.check(url, ip_addresses(numeric))

    def connect(self, url: str, host: str, port: int, *, secure: bool, proxy: HttpProxy | None = None) -> StreamSocket:
        """A connection for `url`, over TLS if it is to be secure.

        A proxy is not used where addresses are checked: it would look the host up by itself.

        Raises:
            LiveError: if it cannot be opened.
            SourceError: as `check`.
        """
        tls = self.tls if secure else None
        if proxy is not None and self.check is None:
            return StreamSocket(host, port, self.closed, tls, self.look_up(url, proxy.host), proxy)
        return StreamSocket(host, port, self.closed, tls, self.look_up(url, host))


def _with_zone(place: tuple[Any, ...]) -> str:
    """The numeric address of a place, with its zone, which Python leaves out of it."""
    zone = place[3] if len(place) > 3 else 0
    return f"{str(place[0]).partition('%')[0]}%{zone}" if zone else str(place[0])


def ip_addresses(numeric: Sequence[str]) -> list[IpAddress]:
    """Addresses without the zones of link-local ones."""
    found = []
    for text in numeric:
        with suppress(ValueError):
            found.append(ipaddress.ip_address(text.partition("%")[0]))
    return found
