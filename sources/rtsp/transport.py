"""RTSP transports: builds and parses the Transport header, and chooses between TCP and UDP after a failure."""

from __future__ import annotations

import re
from typing import Literal

from saccade.sources.errors import LiveError

Transport = Literal["auto", "tcp", "udp", "multicast", "http"]
"""Transport of RTSP packets. "auto" uses TCP, or UDP if TCP is refused, and TCP again if UDP loses too many packets."""

Way = Literal["tcp", "udp", "multicast", "http"]

MAX_LOSS = 0.01  # share of packets; at 1 % UDP shows a fifth of the frames
MIN_PACKETS = 500  # before the share says anything


class TransportRefusedError(LiveError):
    """Raised if the RTSP server refuses the requested transport, such as UDP."""

    def __init__(self, way: Way, shown: str) -> None:
        other = "udp" if way == "tcp" else "tcp"
        super().__init__(
            "connection failed", f"the server refuses {way} ({shown}); set rtsp_transport: auto, or {other}"
        )


class TransportChoice:
    """Selects the RTSP transport of each new connection to a camera. All connections of a source share one instance.

    Args:
        wanted: transport that the user configured. "auto" starts with TCP and tries UDP if TCP fails.
    """

    def __init__(self, wanted: Transport) -> None:
        self._auto = wanted == "auto"
        self.way: Way = "tcp" if wanted == "auto" else wanted
        self._refused: set[Way] = set()

    @property
    def may_switch(self) -> bool:
        """Whether another transport may be tried: "auto" is configured, and the server has refused none so far."""
        return self._auto and not self._refused

    def refused(self) -> bool:
        """Record that the server refused the transport. Return True if another transport is now selected."""
        if not self.may_switch:
            return False
        self._refused.add(self.way)
        self._switch()
        return True

    def failed(self) -> None:
        """Record that a connection got no data or lost many packets. With "auto", select the other transport."""
        if self.may_switch:
            self._switch()

    def is_lossy(self, received: int, lost: int) -> bool:
        """Return whether packet loss over UDP is so high that TCP should be tried.

        Args:
            received: number of received packets.
            lost: number of lost packets.
        """
        total = received + lost
        return self.way == "udp" and self.may_switch and total >= MIN_PACKETS and lost > MAX_LOSS * total

    def _switch(self) -> None:
        self.way = "udp" if self.way == "tcp" else "tcp"


def transport_request(way: Way, profile: str, port: int, channel: int = 0) -> str:
    """Build the Transport header of an RTSP SETUP request.

    Args:
        way: transport to request, such as "tcp" or "udp".
        profile: RTP profile of the stream.
        port: local UDP port for RTP; RTCP uses the next port.
        channel: first interleaved channel over TCP; RTCP uses the next channel.
    """
    profile = profile if re.fullmatch(r"RTP/S?AVPF?", profile) else "RTP/AVP"
    if way == "udp":
        return f"{profile};unicast;client_port={port}-{port + 1}"
    if way == "multicast":
        return f"{profile};multicast"
    return f"{profile}/TCP;unicast;interleaved={channel}-{channel + 1}"


def transport_fields(header: str) -> dict[str, str]:
    """Parse an RTSP Transport header into a dict of parameters. Parameter names are converted to lower case."""
    fields = (item.strip().partition("=")[::2] for item in header.split(";"))
    return {key.strip().lower(): value.strip() for key, value in fields}


def port_pair(text: str) -> tuple[int, int] | None:
    """Parse a pair of port or channel numbers such as `8000-8001`; None if invalid. `8000` is short for `8000-8001`."""
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    if not match or max(int(match[1]), int(match[2] or 0)) > 65535:
        return None
    first = int(match[1])
    return first, int(match[2]) if match[2] else first + 1
