"""An RTSP 1.0 connection (RFC 2326): requests and replies over TCP or TLS, RTP and RTCP beside them or over UDP.

Every wait ends within a tenth of a second of `closed`. Knows nothing of what the packets hold.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from saccade.sources.errors import LiveError
from saccade.sources.rtsp.digest_auth import Credentials
from saccade.sources.urls import RtspAddress

Transport = Literal["tcp", "udp"]

REPLY_S = 5.0
_WAKE_S = 0.1
_READ = 256 << 10  # bytes; a 4K key frame in one call
_MAX_MESSAGE = 1 << 20
_MAX_EARLY = 4096  # packets that overtake the reply to PLAY
_UDP_BUFFER = 4 << 20  # bytes asked of the kernel: a key frame comes in one burst
_RTP, _RTCP = 0, 1


@dataclass(slots=True, frozen=True)
class Reply:
    """A server's answer. Header names are in lower case, each with all its values."""

    status: int
    phrase: str
    headers: dict[str, list[str]]
    body: str

    def header(self, name: str) -> str:
        """The first value of a header; "" when it is not there."""
        return self.headers.get(name, [""])[0]


@dataclass(slots=True, frozen=True)
class Datagram:
    """One RTP or RTCP packet, and `time.monotonic()` when it was read."""

    rtcp: bool
    data: bytes
    at: float


class RtspClient:
    """An open connection to a server.

    Args:
        address: where to, and with which credentials.
        closed: ends every wait when set.

    Raises:
        LiveError: if nobody answers.
    """

    def __init__(self, address: RtspAddress, closed: threading.Event) -> None:
        self._address = address
        self._closed = closed
        self._sequence = 0
        self._buffer = bytearray()
        self._early: deque[Datagram] = deque(maxlen=_MAX_EARLY)
        self._channels = {0: _RTP, 1: _RTCP}
        self._udp: list[socket.socket] = []
        self._session = ""
        self._credentials = Credentials(address.user, address.password or "") if address.user is not None else None
        self._selector = selectors.DefaultSelector()
        try:
            self._socket = self._connect()
        except BaseException:
            self._selector.close()
            raise
        self._selector.register(self._socket, selectors.EVENT_READ)

    def request(self, method: str, url: str = "", headers: dict[str, str] | None = None) -> Reply:
        """Send a request and wait for its answer, giving the password if asked for it.

        Raises:
            LiveError: if the answer is no good, or there is none within 5 s.
        """
        for attempt in range(2):
            number = self.send(method, url, headers)
            reply = self._reply_to(number)
            if reply.status != 401 or attempt:
                break
            if self._credentials is None:
                raise LiveError("auth failed", "the server asks for a user name and a password")
            if not self._credentials.asked(reply.headers.get("www-authenticate", [])):
                raise LiveError("auth failed", "the server asks for a password in a way that is not supported")
        if 200 <= reply.status < 300:
            return reply
        told = f"{reply.status} {reply.phrase}".strip()
        if reply.status in (401, 403):
            raise LiveError("auth failed", f"the server refuses user name or password ({told})")
        if reply.status == 404:
            raise LiveError("not found", f"the server has no such path ({told})")
        if reply.status == 461:
            raise LiveError(
                "connection failed", f"the server refuses this transport ({told}); try the other, tcp or udp"
            )
        raise LiveError("connection failed", f"the server refuses {method} ({told})")

    def send(self, method: str, url: str = "", headers: dict[str, str] | None = None) -> int:
        """Send a request and do not wait; returns its number."""
        url = url or self._address.url
        self._sequence += 1
        lines = {"CSeq": str(self._sequence), "User-Agent": "saccade"}
        if self._session:
            lines["Session"] = self._session
        answer = self._credentials.answer(method, url) if self._credentials else None
        if answer:
            lines["Authorization"] = answer
        text = "".join(f"{key}: {value}\r\n" for key, value in (lines | (headers or {})).items())
        self._write(f"{method} {url} RTSP/1.0\r\n{text}\r\n".encode())
        return self._sequence

    def setup(self, url: str, transport: Transport) -> float:
        """Set one stream up; returns the session's timeout in seconds."""
        if transport == "udp":
            ports = self._open_udp()
            asked = f"RTP/AVP;unicast;client_port={ports}-{ports + 1}"
        else:
            asked = "RTP/AVP/TCP;unicast;interleaved=0-1"
        reply = self.request("SETUP", url, {"Transport": asked})
        self._session, _, rest = reply.header("session").partition(";")
        fields = dict(item.strip().partition("=")[::2] for item in reply.header("transport").lower().split(";"))
        if transport == "udp":
            self._aim_udp(fields)
        else:
            numbers = _pair(fields.get("interleaved", "")) or (0, 1)
            self._channels = {numbers[0]: _RTP, numbers[1]: _RTCP}
        timeout = rest.strip().lower().removeprefix("timeout=")
        return float(timeout) if timeout.isdecimal() and int(timeout) > 1 else 60.0

    def receive(self, timeout_s: float) -> list[Datagram]:
        """The packets that came; nothing after `timeout_s` seconds, or when closed.

        Raises:
            LiveError: if the server has hung up.
        """
        found: list[Datagram] = list(self._early)
        self._early.clear()
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set():
            # Before waiting, since what came last may hold packets that nobody has looked at.
            while (item := self._next_item()) is not None:
                if isinstance(item, Datagram):
                    found.append(item)
                elif item.status == 401 and self._credentials:  # to a keepalive, whose nonce had become stale
                    self._credentials.asked(item.headers.get("www-authenticate", []))
                elif item.status == 454:
                    raise LiveError("connection failed", "the server has ended the session")
            at = time.monotonic()
            found += [Datagram(kind == _RTCP, data, at) for kind, data in self._read_udp()]
            if found or at >= deadline:
                break
            self._wait(deadline - at)
        return found

    def send_rtcp(self, data: bytes) -> None:
        """Send an RTCP packet to the server."""
        if self._udp:
            try:
                self._udp[_RTCP].send(data)
            except OSError:
                return  # nobody listens there yet, or the buffer is full: the next report will do
        else:
            channel = next(number for number, kind in self._channels.items() if kind == _RTCP)
            self._write(bytes((0x24, channel)) + len(data).to_bytes(2, "big") + data)

    def close(self) -> None:
        """Say goodbye, without waiting for an answer, and hang up."""
        try:
            if self._session:
                self.send("TEARDOWN")
        except LiveError:
            pass
        finally:
            self._selector.close()
            for one in (self._socket, *self._udp):
                one.close()

    def _connect(self) -> socket.socket:
        host, port = self._address.host, self._address.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LiveError("connection failed", f"no such host: {host}") from error
        failure = LiveError("connection failed", f"no such host: {host}")
        for family, kind, protocol, _, where in found:
            one = socket.socket(family, kind, protocol)
            try:
                one.setblocking(False)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                deadline = time.monotonic() + REPLY_S
                if one.connect_ex(where):
                    self._until(one, selectors.EVENT_WRITE, deadline)
                    if code := one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise OSError(code, os.strerror(code))
                return self._secure(one, deadline) if self._address.tls else one
            except LiveError as error:
                failure = error
            except ssl.SSLError as error:
                why = getattr(error, "verify_message", "") or error.reason or "handshake failed"
                failure = LiveError("tls", f"{host}:{port}: {why}; SSL_CERT_FILE may name a camera's own certificate")
            except OSError as error:
                failure = LiveError("connection failed", f"{host}:{port}: {error.strerror or error}")
            one.close()
        raise failure

    def _secure(self, one: socket.socket, deadline: float) -> ssl.SSLSocket:
        context = ssl.create_default_context()
        wrapped = context.wrap_socket(one, server_hostname=self._address.host, do_handshake_on_connect=False)
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    return wrapped
                except ssl.SSLWantReadError:
                    self._until(wrapped, selectors.EVENT_READ, deadline)
                except ssl.SSLWantWriteError:
                    self._until(wrapped, selectors.EVENT_WRITE, deadline)
        except BaseException:
            wrapped.close()
            raise

    def _until(self, one: socket.socket, event: int, deadline: float) -> None:
        """Wait until a socket is ready."""
        with selectors.DefaultSelector() as selector:
            selector.register(one, event)
            while not self._closed.is_set() and time.monotonic() < deadline:
                if selector.select(_WAKE_S):
                    return
        raise LiveError("timeout", f"{self._address.host}:{self._address.port} does not answer")

    def _wait(self, timeout_s: float) -> None:
        """Wait until something came on any socket, and take in what the server sent over TCP."""
        pending = isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()
        if not pending and not self._selector.select(min(timeout_s, _WAKE_S)):
            return
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            raise LiveError("connection failed", f"the connection broke ({error.strerror or error})") from error
        if not data:
            raise LiveError("connection failed", "the server has hung up")
        self._buffer += data

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except (BlockingIOError, ssl.SSLWantWriteError) as error:
            raise LiveError("timeout", "the server takes nothing in") from error
        except OSError as error:
            raise LiveError("connection failed", f"the connection broke ({error.strerror or error})") from error

    def _reply_to(self, number: int) -> Reply:
        deadline = time.monotonic() + REPLY_S
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
        """The next packet or answer in what has been taken in; None while it is not whole."""
        buffer = self._buffer
        while buffer:
            if buffer[0] == 0x24:
                end = 4 + int.from_bytes(buffer[2:4], "big")
                if len(buffer) < 4 or len(buffer) < end:
                    return None
                kind, data = self._channels.get(buffer[1]), bytes(buffer[4:end])
                del buffer[:end]
                if kind is not None:
                    return Datagram(kind == _RTCP, data, time.monotonic())
                continue
            if buffer[0] in b"\r\n":
                del buffer[:1]
                continue
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > _MAX_MESSAGE or not buffer[:1].isalpha():
                    raise LiveError("connection failed", "what answers there is no RTSP server")
                return None
            first, *lines = buffer[:end].decode("utf-8", "replace").split("\r\n")
            headers: dict[str, list[str]] = {}
            for line in lines:
                key, _, value = line.partition(":")
                headers.setdefault(key.strip().lower(), []).append(value.strip())
            length = headers.get("content-length", ["0"])[0]
            stop = end + 4 + (int(length) if length.isdecimal() else 0)
            if stop > _MAX_MESSAGE:
                raise LiveError("connection failed", "what answers there is no RTSP server")
            if len(buffer) < stop:
                return None
            body = buffer[end + 4 : stop].decode("utf-8", "replace")
            del buffer[:stop]
            match = re.match(r"RTSP/\d\.\d (\d{3}) ?(.*)", first)
            if match:
                return Reply(int(match[1]), match[2][:80], headers, body)
            if first.startswith("HTTP/") or " RTSP/" not in first:
                raise LiveError("connection failed", "what answers there is no RTSP server")
            # A request of the server's own, such as a keepalive: politely none of our business.
            cseq = headers.get("cseq", ["0"])[0]
            self._write(f"RTSP/1.0 501 Not Implemented\r\nCSeq: {cseq}\r\n\r\n".encode())
        return None

    def _open_udp(self) -> int:
        """Bind two neighbouring ports, RTP on an even one as RFC 3550 wants; returns the first."""
        here = self._socket.getsockname()[0]
        for _ in range(50):
            pair = [socket.socket(self._socket.family, socket.SOCK_DGRAM) for _ in range(2)]
            try:
                pair[0].bind((here, 0))
                port = int(pair[0].getsockname()[1])
                if port % 2 == 0:
                    pair[1].bind((here, port + 1))
                    for one in pair:
                        one.setblocking(False)
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UDP_BUFFER)
                        self._selector.register(one, selectors.EVENT_READ)
                    self._udp = pair
                    return port
            except OSError:
                pass  # somebody has the neighbour
            for one in pair:
                one.close()
        raise LiveError("connection failed", "no two neighbouring UDP ports are free")

    def _aim_udp(self, fields: dict[str, str]) -> None:
        """Take packets from the server only, and let a firewall on the way see that they are expected."""
        ports = _pair(fields.get("server_port", ""))
        host = fields.get("source") or self._socket.getpeername()[0]
        if not ports:
            return
        for one, port in zip(self._udp, ports, strict=True):
            try:
                one.connect((host, port))
                one.send(b"\x80\x00\x00\x00" + bytes(8))
            except OSError:
                continue

    def _read_udp(self) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        for kind, one in enumerate(self._udp):
            for _ in range(_MAX_EARLY):
                try:
                    found.append((kind, one.recv(65536)))
                except BlockingIOError:
                    break
                except OSError:
                    continue  # "connection refused" by an earlier packet of ours
        return found


def _pair(text: str) -> tuple[int, int] | None:
    """Read `8000-8001`, or `8000` alone."""
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    if not match or max(int(match[1]), int(match[2] or 0)) > 65535:
        return None
    first = int(match[1])
    return first, int(match[2]) if match[2] else first + 1
