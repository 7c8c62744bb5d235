"""TCP and TLS connections. Every blocking call returns within 0.1 s after the event `closed` is set."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from saccade.lookups import look_up
from saccade.sources.errors import LiveError
from saccade.sources.network.tls import TlsPolicy, WrongCertificateError, fingerprint_of

CONNECT_S = 5.0
WAKE_S = 0.1
_MAX_HEAD = 16 << 10
_READ = 256 << 10  # bytes; a 4K keyframe fits into one call


class ByteStream(Protocol):
    """Interface of a two-way byte connection: plain TCP, TLS or an HTTP tunnel."""

    def fileno(self) -> int:
        """Return the file descriptor to poll for reading."""
        ...

    @property
    def pending(self) -> bool:
        """Whether received bytes are already buffered outside the socket, so that polling would not report them."""
        ...

    @property
    def local_host(self) -> str:
        """Local IP address of the connection."""
        ...

    @property
    def peer_host(self) -> str:
        """IP address of the server."""
        ...

    def receive(self) -> bytes:
        """Return the received bytes without waiting; b"" if there are none.

        Raises:
            LiveError: if the server has closed the connection.
        """
        ...

    def send(self, data: bytes) -> None:
        """Send all bytes of `data`.

        Raises:
            LiveError: if the connection has failed.
        """
        ...

    def close(self) -> None:
        """Close the byte connection."""
        ...


@dataclass(slots=True, frozen=True)
class HttpProxy:
    """An HTTP proxy that tunnels TLS. `authorization` is the Proxy-Authorization header's value; "" for none."""

    host: str
    port: int
    authorization: str = ""


class StreamSocket:
    """A TCP or TLS connection. The constructor opens it.

    Args:
        host, port: host name or IP address, and port of the server.
        closed: event; setting it aborts all blocking calls.
        tls: which server certificates to accept; None for no TLS.
        addresses: IP addresses of `host`, or of the proxy, tried in this order; None to resolve the name.
        proxy: HTTP proxy that tunnels TLS to `host`; None for a direct connection.

    Raises:
        LiveError: if the connection cannot be opened.
    """

    def __init__(
        self,
        host: str,
        port: int,
        closed: threading.Event,
        tls: TlsPolicy | None = None,
        addresses: Sequence[str] | None = None,
        proxy: HttpProxy | None = None,
    ) -> None:
        self._name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._host = host
        self._closed = closed
        self._tls = tls
        self._proxy = proxy
        there, at = (host, port) if proxy is None else (proxy.host, proxy.port)
        try:
            found = [
                place
                for one in ([there] if addresses is None else addresses)
                for place in look_up(one, at, cancelled=closed)
            ]
        except TimeoutError as error:
            raise LiveError("timeout", str(error)) from None
        except (OSError, UnicodeError) as error:
            raise LiveError("connection failed", f"no such host: {there}") from error
        failure: LiveError | None = None
        for family, kind, protocol, _, address in found:
            opened = socket.socket(family, kind, protocol)
            try:
                self._socket = self._open(opened, address)
                return
            except LiveError as error:
                failure = error
            except WrongCertificateError as error:
                failure = LiveError(
                    "tls", f"{self._name}: the server's certificate is sha256:{error}, not the pinned certificate"
                )
            except ssl.SSLError as error:
                failure = self._explain(error, address)
            except OSError as error:
                failure = LiveError("connection failed", f"{self._name}: {error.strerror or error}")
            opened.close()
        raise failure or LiveError("connection failed", f"no such host: {host}")

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether decrypted bytes are buffered in TLS, so that polling the socket would not report them."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    @property
    def local_host(self) -> str:
        """Local IP address of the connection."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_host(self) -> str:
        """IP address of the server."""
        return str(self._socket.getpeername()[0])

    def receive(self) -> bytes:
        """Return the received bytes without waiting; b"" if there are none.

        Raises:
            LiveError: if the server has closed the connection.
        """
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, ssl.SSLWantReadError):
            return b""
        except OSError as error:
            raise LiveError("connection failed", f"the connection was lost ({error.strerror or error})") from error
        if not data:
            raise LiveError("connection failed", "the server closed the connection")
        return data

    def send(self, data: bytes) -> None:
        """Send all bytes of `data`.

        Raises:
            LiveError: if the connection has failed, or the server does not read the data.
        """
        try:
            self._socket.sendall(data)
        except (BlockingIOError, ssl.SSLWantWriteError) as error:
            raise LiveError("timeout", "the server does not read the requests") from error
        except OSError as error:
            raise LiveError("connection failed", f"the connection was lost ({error.strerror or error})") from error

    def close(self) -> None:
        """Close the TCP or TLS connection."""
        self._socket.close()

    @property
    def raw(self) -> socket.socket:
        """The underlying Python socket, for a library that reads and writes it directly."""
        return self._socket

    def _open(self, opened: socket.socket, address: object) -> socket.socket:
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + CONNECT_S
        code = opened.connect_ex(address)  # type: ignore[arg-type]
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        if code:
            self._until(opened, deadline, write=True)
            if code := opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
        if self._tls is None:
            return opened
        if self._proxy is not None:
            self._pass_through(opened, self._proxy, deadline)
        return self._secure(opened, self._tls, deadline)

    def _pass_through(self, opened: socket.socket, proxy: HttpProxy, deadline: float) -> None:
        """Ask the HTTP proxy to open a tunnel to the server (CONNECT)."""
        authorization = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
        opened.sendall(f"CONNECT {self._name} HTTP/1.1\r\nHost: {self._name}\r\n{authorization}\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            self._until(opened, deadline)
            if not (data := opened.recv(1)) or len(head) > _MAX_HEAD:  # the bytes after the head belong to TLS
                raise LiveError("connection failed", f"{self._name}: the proxy closed the connection")
            head += data
        status = head.decode("latin-1").partition("\r\n")[0]
        if not re.match(r"HTTP/1\.\d 2\d\d", status):
            raise LiveError("connection failed", f"{self._name}: the proxy answers {status[:80]!a}")

    def _secure(self, opened: socket.socket, tls: TlsPolicy, deadline: float) -> ssl.SSLSocket:
        host = self._host.partition("%")[0]  # no certificate names a zone
        wrapped = tls.context().wrap_socket(opened, server_hostname=host, do_handshake_on_connect=False)
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._until(wrapped, deadline)
                except ssl.SSLWantWriteError:
                    self._until(wrapped, deadline, write=True)
            tls.check(wrapped)
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _until(self, opened: socket.socket, deadline: float, *, write: bool = False) -> None:
        while not self._closed.is_set() and time.monotonic() < deadline:
            if wait_for([] if write else [opened.fileno()], WAKE_S, [opened.fileno()] if write else []):
                return
        raise LiveError("timeout", f"{self._name} does not answer")

    def _explain(self, error: ssl.SSLError, address: object) -> LiveError:
        why = getattr(error, "verify_message", "") or error.reason or "handshake failed"
        hint = "set tls: sha256:… to the certificate's fingerprint, or SSL_CERT_FILE to its issuer"
        if isinstance(error, ssl.SSLCertVerificationError) and self._proxy is None:
            try:
                found = ssl.get_server_certificate(address[:2], timeout=CONNECT_S)  # type: ignore[index]
                hint = f"set tls: sha256:{fingerprint_of(ssl.PEM_cert_to_DER_cert(found))} to accept only this one"
            except (OSError, ValueError):
                pass
        return LiveError("tls", f"{self._name}: {why}; {hint}")


def wait_for(readers: list[int], timeout_s: float, writers: list[int] | None = None) -> list[int]:
    """Return the file descriptors that are ready within `timeout_s` seconds. Descriptors above 1023 are supported."""
    poll = select.poll()
    for descriptor in readers:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writers or ():
        poll.register(descriptor, select.POLLOUT)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s * 1000))]
