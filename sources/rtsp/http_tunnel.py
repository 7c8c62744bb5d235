"""RTSP over HTTP, for firewalls that block RTSP.

An HTTP GET carries replies and packets from the server. An HTTP POST carries requests to the server.
"""

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
    """A two-way byte stream through two HTTP connections, for RTSP over HTTP.

    Args:
        connect: opens a connection to the server.
        path: path of the GET and POST requests.
        credentials: user name and password for the HTTP requests; None to send none.
        closed: event; setting it aborts all blocking calls.

    Raises:
        LiveError: if the server does not support RTSP over HTTP at this address.
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
                    raise LiveError("connection failed", f"the server does not support RTSP over HTTP ({shown})")
            except BaseException:
                self._down.close()
                raise
            self._down.close()
        else:
            raise LiveError("auth failed", "the server rejects the user name or password (HTTP 401)", refused=True)
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
        """Return the file descriptor of the receiving connection (HTTP GET), for polling."""
        return self._down.fileno()

    @property
    def pending(self) -> bool:
        """Whether received bytes are buffered, in this object or in TLS."""
        return bool(self._rest) or self._down.pending

    @property
    def local_host(self) -> str:
        """Local IP address of the receiving connection."""
        return self._down.local_host

    @property
    def peer_host(self) -> str:
        """IP address of the server."""
        return self._down.peer_host

    def receive(self) -> bytes:
        """Return the received bytes without waiting; b"" if there are none.

        Raises:
            LiveError: if the server has closed the connection.
        """
        rest, self._rest = self._rest, b""
        return rest or self._down.receive()

    def send(self, data: bytes) -> None:
        """Send all bytes of `data` through the HTTP POST, encoded in Base64.

        Raises:
            LiveError: if the connection has failed.
        """
        self._up.send(base64.b64encode(data))

    def close(self) -> None:
        """Close both HTTP connections of the tunnel."""
        self._down.close()
        self._up.close()

    def _read_head(self) -> tuple[str, bytes]:
        """Return the status line and headers of the HTTP response, and the bytes that arrived after them."""
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
