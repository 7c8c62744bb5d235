"""RTP over UDP: unicast to two local ports (RTP and RTCP), or a multicast group."""

from __future__ import annotations

import ipaddress
import socket
import struct
import time

from saccade.sources.errors import LiveError

RTP, RTCP = 0, 1
_BUFFER = 4 << 20  # bytes asked of the kernel: a keyframe comes in one burst
_MAX_AT_ONCE = 4096  # packets
_PATIENT_S = 1.0  # without packets from the announced hosts before another is taken
_PUNCH = b"\x80\x00\x00\x00" + bytes(8)


class UdpPair:
    """Two UDP sockets, for RTP and RTCP.

    Packets are accepted from the server's IP addresses. If they send nothing for 1 s, for example because of NAT, one
    other address is accepted.

    Args:
        local_host: IP address of the local interface that reaches the server.
    """

    def __init__(self, local_host: str) -> None:
        self._family = socket.AF_INET6 if ":" in local_host else socket.AF_INET
        self._local_host = local_host
        self._sockets: list[socket.socket] = []
        self._expected: set[str] = set()
        self._expected_at = -_PATIENT_S  # when a packet last came from an expected host
        self._other: str | None = None
        self._rtcp_to: tuple[str, int] | None = None

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of both sockets, for polling."""
        return [one.fileno() for one in self._sockets]

    def bind(self) -> int:
        """Bind the sockets to an even port for RTP and the next port for RTCP (RFC 3550). Return the RTP port.

        Raises:
            LiveError: if no such pair of ports is free.
        """
        for _ in range(50):
            pair = [socket.socket(self._family, socket.SOCK_DGRAM) for _ in range(2)]
            try:
                pair[RTP].bind((self._local_host, 0))
                port = int(pair[RTP].getsockname()[1])
                if port % 2 == 0:
                    pair[RTCP].bind((self._local_host, port + 1))
                    self._take(pair)
                    return port
            except OSError:
                pass  # another process has the neighbour
            for one in pair:
                one.close()
        raise LiveError("connection failed", "RTP over UDP needs two consecutive free UDP ports, but none were found")

    def announce(self, hosts: set[str], host: str, ports: tuple[int, int] | None) -> None:
        """Set the addresses of the server, and send it a packet on each port to open firewalls (hole punching).

        Args:
            hosts: IP addresses from which packets are accepted.
            host: IP address to which packets are sent.
            ports: RTP and RTCP ports of the server. If None, no packets are sent.
        """
        self._expected = hosts
        if ports:
            self._rtcp_to = host, ports[RTCP]
            for one, port in zip(self._sockets, ports, strict=True):
                try:
                    one.sendto(_PUNCH, (host, port))
                except OSError:
                    continue

    def join(self, group: str, ports: tuple[int, int]) -> None:
        """Join a multicast group and accept its packets from any sender.

        Args:
            group: IPv4 address of the group.
            ports: RTP and RTCP ports of the group.

        Raises:
            LiveError: if the group cannot be joined.
        """
        pair = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        try:
            if not ipaddress.IPv4Address(group).is_multicast:
                raise OSError(0, "not a multicast group")
            for one, port in zip(pair, ports, strict=True):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((group, port))
                one.setsockopt(
                    socket.IPPROTO_IP,
                    socket.IP_ADD_MEMBERSHIP,
                    struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton(self._local_host)),
                )
                one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(self._local_host))
        except (OSError, ValueError) as error:
            for one in pair:
                one.close()
            raise LiveError("connection failed", f"multicast group {group[:40]} cannot be joined ({error})") from error
        self._rtcp_to = group, ports[RTCP]
        self._take(pair)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the received packets without waiting, each as its kind (`RTP` or `RTCP`) and data."""
        found: list[tuple[int, bytes]] = []
        for kind, one in enumerate(self._sockets):
            for _ in range(_MAX_AT_ONCE):
                try:
                    data, address = one.recvfrom(65536)
                except BlockingIOError:
                    break
                except OSError:
                    continue  # "connection refused" by an earlier packet of ours
                if self._accepts(address[0], time.monotonic()):
                    found.append((kind, data))
                    if kind == RTCP and self._other == address[0]:
                        self._rtcp_to = address[0], address[1]
        return found

    def send_rtcp(self, data: bytes) -> None:
        """Send an RTCP report to the server. Errors are ignored, because reports are sent periodically."""
        if self._rtcp_to is not None:
            try:
                self._sockets[RTCP].sendto(data, self._rtcp_to)
            except OSError:
                return

    def close(self) -> None:
        """Close both UDP sockets."""
        for one in self._sockets:
            one.close()

    def _accepts(self, host: str, now: float) -> bool:
        if host in self._expected:
            self._expected_at, self._other = now, None
            return True
        if self._other is None and now - self._expected_at > _PATIENT_S:
            self._other = host
        return host == self._other

    def _take(self, pair: list[socket.socket]) -> None:
        for one in pair:
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._sockets = pair
