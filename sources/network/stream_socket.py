"""TCP and TLS connections whose every wait ends within a tenth of a second of an event. Knows nothing of RTSP."""

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
_READ = 256 << 10  # bytes; a 4K key frame in one call


class ByteStream(Protocol):
    """A connection for bytes in both directions: plain, encrypted or tunnelled."""

    def fileno(self) -> int:
        """What to wait on for reading."""
        ...

    @property
    def pending(self) -> bool:
        """Whether `receive` has something although nothing is to be read from the socket."""
        ...

    @property
    def local_host(self) -> str:
        """Our address."""
        ...

    @property
    def peer_host(self) -> str:
        """The server's address."""
        ...

    def receive(self) -> bytes:
        """What has arrived, without waiting; may be empty.

        Raises:
            LiveError: if the server has hung up.
        """
        ...

    def send(self, data: bytes) -> None:
        """Send all of `data`.

        Raises:
            LiveError: if the connection is broken.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(slots=True, frozen=True)
class HttpProxy:
    """A proxy that passes TLS through; `authorization` is the value of its header, "" for none."""

    host: str
    port: int
    authorization: str = ""


class StreamSocket:
    """A TCP or TLS connection, open from construction on.

    Args:
        host, port: where to.
        closed: ends every wait when set.
        tls: which certificates are accepted; None for no TLS.
        addresses: the numeric addresses of `host`, or of the proxy, tried in this order; None to look them up.
        proxy: what to connect to instead, and what passes TLS through to `host`.

    Raises:
        LiveError: if it cannot be opened.
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
                failure = LiveError("tls", f"{self._name}: its certificate is sha256:{error}, not the pinned one")
            except ssl.SSLError as error:
                failure = self._explain(error, address)
            except OSError as error:
                failure = LiveError("connection failed", f"{self._name}: {error.strerror or error}")
            opened.close()
        raise failure or LiveError("connection failed", f"no such host: {host}")

    def fileno(self) -> int:
        """The socket."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether TLS holds decrypted bytes."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    @property
    def local_host(self) -> str:
        """Our address."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_host(self) -> str:
        """The server's address."""
        return str(self._socket.getpeername()[0])

    def receive(self) -> bytes:
        """What has arrived, without waiting; may be empty.

        Raises:
            LiveError: if the server has hung up.
        """
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, ssl.SSLWantReadError):
            return b""
        except OSError as error:
            raise LiveError("connection failed", f"the connection broke ({error.strerror or error})") from error
        if not data:
            raise LiveError("connection failed", "the server has hung up")
        return data

    def send(self, data: bytes) -> None:
        """Send all of `data`.

        Raises:
            LiveError: if the connection is broken, or the server's buffers are full.
        """
        try:
            self._socket.sendall(data)
        except (BlockingIOError, ssl.SSLWantWriteError) as error:
            raise LiveError("timeout", "the server does not read our requests") from error
        except OSError as error:
            raise LiveError("connection failed", f"the connection broke ({error.strerror or error})") from error

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    @property
    def raw(self) -> socket.socket:
        """The socket itself, for a library that reads and writes it."""
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
        """Have the proxy connect to the server."""
        authorization = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
        opened.sendall(f"CONNECT {self._name} HTTP/1.1\r\nHost: {self._name}\r\n{authorization}\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            self._until(opened, deadline)
            if not (data := opened.recv(1)) or len(head) > _MAX_HEAD:  # what follows belongs to TLS
                raise LiveError("connection failed", f"{self._name}: the proxy has hung up")
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
        """Wait until a socket is ready."""
        while not self._closed.is_set() and time.monotonic() < deadline:
            if wait_for([] if write else [opened.fileno()], WAKE_S, [opened.fileno()] if write else []):
                return
        raise LiveError("timeout", f"{self._name} does not answer")

    def _explain(self, error: ssl.SSLError, address: object) -> LiveError:
        why = getattr(error, "verify_message", "") or error.reason or "handshake failed"
        hint = "set tls: sha256:… to its fingerprint, or SSL_CERT_FILE to its issuer"
        if isinstance(error, ssl.SSLCertVerificationError) and self._proxy is None:
            try:
                found = ssl.get_server_certificate(address[:2], timeout=CONNECT_S)  # type: ignore[index]
                hint = f"set tls: sha256:{fingerprint_of(ssl.PEM_cert_to_DER_cert(found))} to accept exactly this one"
            except (OSError, ValueError):
                pass
        return LiveError("tls", f"{self._name}: {why}; {hint}")


def wait_for(readers: list[int], timeout_s: float, writers: list[int] | None = None) -> list[int]:
    """The file descriptors that are ready within `timeout_s` seconds. Without select's limit of 1024 descriptors."""
    poll = select.poll()
    for descriptor in readers:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writers or ():
        poll.register(descriptor, select.POLLOUT)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s * 1000))]
