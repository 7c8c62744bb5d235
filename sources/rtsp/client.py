"""RTSP 1.0 client (RFC 2326). Requests use TCP, TLS or an HTTP tunnel; packets use interleaved TCP or UDP.

Every blocking call returns within 0.1 s after the event `closed` is set.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from saccade.sources.errors import LiveError
from saccade.sources.network.dialer import CheckAddress, Dialer
from saccade.sources.network.digest_auth import Credentials
from saccade.sources.network.stream_socket import WAKE_S, ByteStream, wait_for
from saccade.sources.network.tls import TlsPolicy
from saccade.sources.rtsp.http_tunnel import HttpTunnel
from saccade.sources.rtsp.messages import MessageParser, ProtocolError, Reply, ServerRequest
from saccade.sources.rtsp.sdp import Media
from saccade.sources.rtsp.transport import TransportRefusedError, Way, port_pair, transport_fields, transport_request
from saccade.sources.rtsp.udp import RTCP, RTP, UdpPair
from saccade.sources.urls import RtspAddress

REPLY_S = 4.0  # and a new attempt half a second later: a camera that thaws is live within 5 s
SLOW_REPLY_S = 15.0  # for what makes a camera start its encoder
_SLOW = ("DESCRIBE", "SETUP", "PLAY")
_MAX_EARLY = 4096  # packets that overtake the reply to PLAY
_REDIRECTS = (301, 302, 303, 305, 307)


class RedirectError(Exception):
    """Raised if the RTSP server redirects the client. The exception's argument is the new URL."""


@dataclass(slots=True)
class Datagram:
    """One received RTP or RTCP packet.

    Attributes:
        rtcp: True for RTCP, False for RTP.
        data: the packet's bytes.
        at: arrival time from `time.monotonic()`, in seconds.
        stream: index of the media stream, in the order of the SETUP requests.
    """

    rtcp: bool
    data: bytes
    at: float
    stream: int = 0


class RtspClient:
    """An open connection to an RTSP server.

    Args:
        address: address of the server, with credentials.
        closed: event; setting it aborts all blocking calls.
        way: transport of the RTP packets, such as "tcp" or "udp". "http" also tunnels the requests.
        tls: which certificates of an rtsps server to accept.
        check: raises SourceError for a forbidden address; None to allow any address.

    Attributes:
        heard_at: time of the last packet or reply, in seconds of `time.monotonic()`.

    Raises:
        LiveError: if the server does not answer.
        SourceError: if `check` forbids the address.
    """

    def __init__(
        self,
        address: RtspAddress,
        closed: threading.Event,
        way: Way = "tcp",
        tls: TlsPolicy | None = None,
        check: CheckAddress | None = None,
    ) -> None:
        self._address = address
        self._closed = closed
        self._way = way
        self._sequence = 0
        self._parser = MessageParser()
        self._early: deque[Datagram] = deque(maxlen=_MAX_EARLY)
        self._channels: dict[int, tuple[int, int]] = {}  # interleaved channel → stream, RTP or RTCP
        self._udp: list[UdpPair] = []  # of each stream
        self._streams = 0  # that were set up
        self._session = ""
        self._credentials = _credentials_of(address)
        self._dialer = Dialer(closed, tls or TlsPolicy(), check)
        self._stream: ByteStream = self._connect()
        self.heard_at = time.monotonic()

    def request(self, method: str, url: str = "", headers: dict[str, str] | None = None) -> Reply:
        """Send an RTSP request and return its reply. Authenticate if the server asks for a password.

        Raises:
            LiveError: if the server refuses the request, or does not reply within 4 s (15 s for DESCRIBE,
                SETUP and PLAY).
            RedirectError: if the server redirects the client.
            TransportRefusedError: if the server refuses the transport.
        """
        for attempt in range(3):
            number = self.send(method, url, headers)
            reply = self._reply_to(number, SLOW_REPLY_S if method in _SLOW else REPLY_S)
            if reply.status != 401:
                break
            if self._credentials is None:
                raise LiveError("auth failed", "the server requires a user name and a password")
            if not self._credentials.challenge(reply.headers.get("www-authenticate", [])):
                raise LiveError("auth failed", "the server supports neither Basic nor Digest authentication")
            if attempt and not self._credentials.stale:
                break
        if 200 <= reply.status < 300:
            return reply
        shown = f"{reply.status} {reply.phrase}".strip()
        if reply.status in _REDIRECTS and (location := reply.header("location")):
            raise RedirectError(location)
        if reply.status in (401, 403):
            refused = self._credentials is not None
            raise LiveError("auth failed", f"the server rejects the user name or password ({shown})", refused=refused)
        if reply.status == 404:
            raise LiveError("not found", f"the server has no such path ({shown})")
        if reply.status == 461:
            raise TransportRefusedError(self._way, shown)
        raise LiveError("connection failed", f"the server refuses {method} ({shown})")

    def send(self, method: str, url: str = "", headers: dict[str, str] | None = None) -> int:
        """Send an RTSP request without waiting for the reply. Return the request's CSeq number."""
        url = url or self._address.url
        self._sequence += 1
        lines = {"CSeq": str(self._sequence), "User-Agent": "saccade"}
        if self._session:
            lines["Session"] = self._session
        answer = self._credentials.authorization(method, url) if self._credentials else None
        if answer:
            lines["Authorization"] = answer
        text = "".join(f"{key}: {value}\r\n" for key, value in (lines | (headers or {})).items())
        self._stream.send(f"{method} {url} RTSP/1.0\r\n{text}\r\n".encode())
        return self._sequence

    def setup(self, media: Media) -> float:
        """Set up a media stream of the session with the request SETUP. Return the session timeout in seconds.

        Raises:
            LiveError, RedirectError, TransportRefusedError: as in `request`.
        """
        number, port, udp = self._streams, 0, None
        if self._way in ("udp", "multicast"):
            udp = UdpPair(self._stream.local_host)
            self._udp.append(udp)  # from now on it is closed with the client
            port = udp.bind() if self._way == "udp" else 0
        transport = transport_request(self._way, media.profile, port, 2 * number)
        reply = self.request("SETUP", media.control, {"Transport": transport})
        self._session, _, rest = reply.header("session").partition(";")
        fields = transport_fields(reply.header("transport"))
        if udp is None:
            numbers = port_pair(fields.get("interleaved", "")) or (2 * number, 2 * number + 1)
            self._channels |= {numbers[0]: (number, RTP), numbers[1]: (number, RTCP)}
            self._parser.channels = frozenset(self._channels)
        elif self._way == "multicast":
            ports = port_pair(fields.get("port", "")) or port_pair(fields.get("client_port", ""))
            if not ports or "destination" not in fields:
                raise TransportRefusedError(self._way, "no multicast group in the reply")
            udp.join(fields["destination"], ports)
        else:
            peer = self._stream.peer_host
            # A server could name any host, which would then get packets.
            source = peer if self._dialer.check else fields.get("source", peer)
            udp.announce({source, peer}, source, port_pair(fields.get("server_port", "")))
        self._streams += 1
        return session_timeout(rest)

    def receive(self, timeout_s: float) -> list[Datagram]:
        """Wait up to `timeout_s` seconds and return the received packets; an empty list if none arrived.

        Raises:
            LiveError: if the connection has failed.
            RedirectError: if the server redirects the client during playback.
        """
        found: list[Datagram] = list(self._early)
        self._early.clear()
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set():
            # Before waiting, since what came last may hold packets that were not read yet.
            while (item := self._next_item()) is not None:
                if isinstance(item, Datagram):
                    found.append(item)
                elif item.status == 401 and self._credentials:  # to a keepalive, whose nonce had expired
                    self._credentials.challenge(item.headers.get("www-authenticate", []))
                elif item.status == 454:
                    raise LiveError("connection failed", "the server has ended the session")
            at = time.monotonic()
            for number, udp in enumerate(self._udp):
                packets = udp.receive()
                found += [Datagram(kind == RTCP, data, at, number) for kind, data in packets]
                self.heard_at = at if packets else self.heard_at
            if found or at >= deadline:
                break
            self._wait(deadline - at)
        return found

    def send_rtcp(self, data: bytes) -> None:
        """Send the server an RTCP packet that concerns the first media stream."""
        if self._udp:
            self._udp[0].send_rtcp(data)
        else:
            channel = next(number for number, (_, kind) in self._channels.items() if kind == RTCP)
            self._stream.send(bytes((0x24, channel)) + len(data).to_bytes(2, "big") + data)

    def close(self) -> None:
        """Send TEARDOWN without waiting for a reply, and close the connection."""
        try:
            if self._session:
                self.send("TEARDOWN")
        except LiveError:
            pass
        finally:
            self._stream.close()
            for udp in self._udp:
                udp.close()

    def _connect(self) -> ByteStream:
        address = self._address
        if self._way != "http":
            return self._dialer.connect(address.url, address.host, address.port, secure=address.tls)
        port = address.port if not address.default_port else 443 if address.tls else 80
        parts = urlsplit(address.url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        credentials = _credentials_of(address)  # its own, since nonces are counted
        return HttpTunnel(
            lambda: self._dialer.connect(address.url, address.host, port, secure=address.tls),
            path,
            credentials,
            self._closed,
        )

    def _wait(self, timeout_s: float) -> None:
        """Wait until data has arrived on a socket. Data of the RTSP connection is passed to the parser."""
        stream = self._stream
        if not stream.pending:
            descriptors = [stream.fileno(), *(one for udp in self._udp for one in udp.descriptors)]
            if stream.fileno() not in wait_for(descriptors, min(timeout_s, WAKE_S)):
                return
        if data := stream.receive():
            self.heard_at = time.monotonic()
            self._parser.feed(data)

    def _reply_to(self, number: int, timeout_s: float) -> Reply:
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set() and (left := deadline - time.monotonic()) > 0:
            item = self._next_item()
            if item is None:
                self._wait(left)
            elif isinstance(item, Datagram):
                self._early.append(item)
            elif item.header("cseq") in (str(number), ""):
                return item
        raise LiveError("timeout", f"{self._address.host}:{self._address.port} does not answer")

    def _next_item(self) -> Datagram | Reply | None:
        """Return the next RTP packet, RTCP packet or reply; None if none is complete yet."""
        while True:
            try:
                item = self._parser.next_item()
            except ProtocolError:
                raise LiveError("connection failed", "the answer is not RTSP; check the address and port") from None
            if item is None or isinstance(item, Reply):
                return item
            if isinstance(item, ServerRequest):
                self._answer(item)
            elif (place := self._channels.get(item.channel)) is not None:
                return Datagram(place[1] == RTCP, item.data, self.heard_at, place[0])

    def _answer(self, request: ServerRequest) -> None:
        """Reply to an RTSP request from the server, such as OPTIONS."""
        cseq = request.headers.get("cseq", ["0"])[0]
        status = "200 OK" if request.method in ("OPTIONS", "GET_PARAMETER", "SET_PARAMETER") else "501 Not Implemented"
        self._stream.send(f"RTSP/1.0 {status}\r\nCSeq: {cseq}\r\n\r\n".encode())
        if request.method == "REDIRECT" and (location := request.headers.get("location")):
            raise RedirectError(location[0])


def _credentials_of(address: RtspAddress) -> Credentials | None:
    return Credentials(address.user, address.password or "") if address.user is not None else None


def session_timeout(parameters: str) -> float:
    """Return the timeout in seconds that an RTSP Session header states, such as ";timeout=10"; 60 if it states none."""
    found = re.search(r"(?:^|;)\s*timeout\s*=\s*\"?([0-9]{1,5})\b", parameters, re.IGNORECASE)
    return max(1.0, float(found[1])) if found else 60.0
