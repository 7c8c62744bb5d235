"""RTSP over HTTP for restrictive firewalls: replies and packets arrive through a GET, requests leave through a POST."""

from __future__ import annotations

import base64
import re
import secrets
import threading
import time
from collections.abc import Callable

from saccade.sources.errors import LiveError
from saccade.sources.network.digest_auth import Credentials
from saccade.sources.network.stream_socket import CONNECT_S, WAKE_S, StreamSocket, wait_for

_TYPE = "application/x-rtsp-tunnelled"
_MAX_HEAD = 64 << 10


class HttpTunnel:
    """A `ByteStream` through two HTTP connections.

    Args:
        connect: opens a connection to the server.
        path: path of the GET and POST requests.
        credentials: credentials for the tunnel itself; None for none.
        closed: ends every wait when set.

    Raises:
        LiveError: if the server provides no tunnel at this address.
    """

    def __init__(
        self, connect: Callable[[], StreamSocket], path: str, credentials: Credentials | None, closed: threading.Event
    ) -> None:
        self._closed = closed
        cookie = secrets.token_hex(11)
        common = f"Host: saccade\r\nUser-Agent: saccade\r\nx-sessioncookie: {cookie}\r\nPragma: no-cache\r\n"
        common += "Cache-Control: no-cache\r\n"
        for _ in range(2):
            self._down = connect()
            try:
                self._down.send(
                    f"GET {path} HTTP/1.0\r\n{common}{_authorization(credentials, 'GET', path)}"
                    f"Accept: {_TYPE}\r\n\r\n".encode()
                )
                head, self._rest = self._read_head()
                status = re.match(r"HTTP/\d\.\d (\d{3})", head)
                if status and status[1] == "200":
                    break
                challenges = re.findall(r"(?im)^www-authenticate:\s*(.+?)\r?$", head)
                if not (status and status[1] == "401" and credentials and credentials.challenge(challenges)):
                    shown = status[1] if status else "no HTTP"
                    raise LiveError("connection failed", f"the server offers no RTSP over HTTP ({shown})")
            except BaseException:
                self._down.close()
                raise
            self._down.close()
        else:
            raise LiveError("auth failed", "the server rejects user name or password (HTTP 401)", refused=True)
        try:
            self._up = connect()
        except BaseException:
            self._down.close()
            raise
        self._up.send(
            f"POST {path} HTTP/1.0\r\n{common}{_authorization(credentials, 'POST', path)}"
            f"Content-Type: {_TYPE}\r\nContent-Length: 32767\r\n\r\n".encode()
        )

    def fileno(self) -> int:
        """Return the file descriptor of the GET connection."""
        return self._down.fileno()

    @property
    def pending(self) -> bool:
        """Whether bytes are buffered here or in TLS."""
        return bool(self._rest) or self._down.pending

    @property
    def local_host(self) -> str:
        """The local IP address."""
        return self._down.local_host

    @property
    def peer_host(self) -> str:
        """The server's IP address."""
        return self._down.peer_host

    def receive(self) -> bytes:
        """Return the data that has arrived, without waiting; may be empty.

        Raises:
            LiveError: if the server has closed the connection.
        """
        rest, self._rest = self._rest, b""
        return rest or self._down.receive()

    def send(self, data: bytes) -> None:
        """Send all of `data`.

        Raises:
            LiveError: if the connection is broken.
        """
        self._up.send(base64.b64encode(data))

    def close(self) -> None:
        """Close both connections."""
        self._down.close()
        self._up.close()

    def _read_head(self) -> tuple[str, bytes]:
        """Return the head of the response, and the bytes received after it."""
        data = b""
        deadline = time.monotonic() + CONNECT_S
        while b"\r\n\r\n" not in data:
            if self._closed.is_set() or time.monotonic() > deadline or len(data) > _MAX_HEAD:
                raise LiveError("timeout", "the server does not answer over HTTP")
            if self._down.pending or wait_for([self._down.fileno()], WAKE_S):
                data += self._down.receive()
        head, _, rest = data.partition(b"\r\n\r\n")
        return head.decode("latin-1"), rest


def _authorization(credentials: Credentials | None, method: str, path: str) -> str:
    answer = credentials.authorization(method, path) if credentials else None
    return f"Authorization: {answer}\r\n" if answer else ""
