"""Opens HTTP files for FFmpeg, including HLS playlists, segments and keys.

Unlike FFmpeg's HTTP client, this module applies the user's certificate policy and checks IP addresses.
"""

from __future__ import annotations

import base64
import http.client
import io
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.cookiejar import CookieJar
from typing import Protocol
from urllib.parse import quote, unquote, unquote_to_bytes, urljoin, urlsplit
from urllib.request import Request, getproxies, proxy_bypass

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from saccade.sources.errors import LiveError, SourceError
from saccade.sources.network.dialer import Dialer
from saccade.sources.network.digest_auth import Credentials
from saccade.sources.network.stream_socket import HttpProxy
from saccade.sources.urls import redact

_MAX_REDIRECTS = 8
_REDIRECTS = (301, 302, 303, 307, 308)
_SKIPPED = 256 << 10  # bytes; up to this distance, reading on is faster than a new request
_MAX_PLAYLIST = 4 << 20
_MAX_DISCARDED = 64 << 20  # bytes to skip if the server ignores a range request
_HEAD = 4096  # bytes read ahead to recognise an MP4
_PLAYLISTS = ("application/vnd.apple.mpegurl", "application/x-mpegurl", "audio/mpegurl", "audio/x-mpegurl")
_URI = re.compile(r'(URI=")([^"]*)"')
_SAFE = "/%:=&?~+!$,;'@()*[]|{}^<>`"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # urlsplit drops some control characters, so a check could see another host
_BLOCK = 16


class ReadableFile(Protocol):
    """Interface of a file object that FFmpeg reads through PyAV."""

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; return b"" at the end of the file."""
        ...


@dataclass(slots=True, frozen=True)
class _Place:
    """A parsed HTTP URL. `origin` is a tuple (True for HTTPS, host, port)."""

    url: str
    origin: tuple[bool, str, int]
    path: str
    credentials: Credentials | None

    @classmethod
    def parse(cls, url: str) -> _Place:
        try:
            parts = urlsplit(url)
            secure = parts.scheme.lower() == "https"
            host, port = parts.hostname or "", parts.port or (443 if secure else 80)
        except ValueError:
            host = ""
        if not host or parts.scheme.lower() not in ("http", "https") or _CONTROL.search(url):
            raise LiveError("connection failed", f"{redact(url)} is not a valid address")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        user = None
        if parts.username is not None:
            user = Credentials(unquote(parts.username), unquote(parts.password or ""))
        return cls(url, (secure, host, port), quote(path, safe=_SAFE), user)


class _Connection(http.client.HTTPConnection):
    """An open HTTP connection. The attribute `numeric` is the server's IP address."""

    def __init__(self, place: _Place, dialer: Dialer, timeout_s: float) -> None:
        self._secure, host, port = place.origin
        super().__init__(host.partition("%")[0], port)  # the IPv6 zone is meaningless to the server
        self.default_port = 443 if self._secure else 80  # the Host header omits the default port
        proxy = _proxy_of(self._secure, host) if dialer.check is None else None
        opened = dialer.connect(place.url, host, port, secure=self._secure, proxy=proxy)
        self.proxy = None if self._secure else proxy  # with TLS, the proxy only opens the tunnel
        self.numeric = opened.peer_host
        self.opened = opened.raw
        self.opened.settimeout(timeout_s)
        self.sock = self.opened

    def connect(self) -> None:
        raise http.client.NotConnected  # the connection is open from the start and must not be reopened


class HttpFiles:
    """Opens files over HTTP. The files share cookies, credentials and connections.

    Attributes:
        failure: last error of a file that a playlist names, such as a segment; None without an error.
        refused: error because of a forbidden address or a rejected certificate, or None. No file is opened after it.

    Args:
        dialer: opens the connections.
        answer_s: timeout for the server's response, in seconds.
        silence_s: timeout for each read, in seconds.
    """

    def __init__(self, dialer: Dialer, answer_s: float, silence_s: float) -> None:
        self._dialer = dialer
        self._answer_s = answer_s
        self._silence_s = silence_s
        self._cookies = CookieJar()
        self._credentials: dict[tuple[bool, str, int], Credentials] = {}
        self._lock = threading.Lock()  # guards the next three attributes
        self._closed = False
        self._connections: set[_Connection] = set()
        self._idle: dict[tuple[bool, str, int], _Connection] = {}
        self._first: HttpFile | None = None
        self.failure: SourceError | None = None
        self.refused: SourceError | None = None

    def open_first(self, url: str) -> HttpFile:
        """Open the first file. The next call of `open` returns the same file and ignores its arguments.

        Raises:
            LiveError: if the file cannot be opened.
            SourceError: if an address is forbidden.
        """
        self._first = HttpFile(self, url)
        return self._first

    def open(self, url: str, _flags: int, options: Mapping[str, str]) -> ReadableFile:
        """Open a file for FFmpeg (PyAV's callback `io_open`). Return an empty file if it cannot be opened.

        Raises:
            SourceError: if an address is forbidden or a certificate is rejected, now or in a previous call.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if url.startswith("data:"):
            head, _, body = url.partition(",")
            return io.BytesIO(base64.b64decode(body) if head.endswith(";base64") else unquote_to_bytes(body))
        encrypted = re.match(r"crypto[:+]", url)
        end = int(options.get("end_offset", 0))
        try:
            file = HttpFile(
                self, url[encrypted.end() :] if encrypted else url, int(options.get("offset", 0)), end, nested=True
            )
        except LiveError as error:
            if error is self.refused:
                raise
            self.failure = error
            return io.BytesIO()
        if encrypted:
            return _Decrypted(file, bytes.fromhex(options["key"]), bytes.fromhex(options["iv"]))
        return file

    def close(self) -> None:
        """Shut down all connections, so that pending reads fail. Thread-safe, unlike `free`."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                with suppress(OSError):  # SSLSocket.shutdown would break a concurrent reader
                    socket.socket.shutdown(connection.opened, socket.SHUT_RDWR)

    def free(self) -> None:
        """Close all connections. Call this only when no thread reads from a file."""
        self.close()
        for connection in list(self._connections):
            self.discard(connection)

    def request(self, url: str, begin: int, end: int) -> tuple[http.client.HTTPResponse, _Connection, str]:
        """Send a GET request for a byte range, and follow redirects.

        Args:
            url: URL of the file.
            begin: offset of the first byte.
            end: offset after the last byte; 0 for the end of the file.

        Returns:
            The response, its connection, and the final URL after redirects.

        Raises:
            LiveError: if the request fails, or the server has no such file.
            SourceError: if an address is forbidden.
        """
        wanted = f"bytes={begin}-{end - 1 if end else ''}"
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                if self.refused is not None:
                    raise self.refused
                response, connection = self._ask(_Place.parse(url), wanted)
                if response.status in (200, 206):
                    return response, connection, url
                self.discard(connection)
                location = response.getheader("Location") if response.status in _REDIRECTS else None
                if not location:
                    raise _explained(response, redact(url), _Place.parse(url).origin in self._credentials)
                url = _joined(url, location)
                if not url.lower().startswith(("http://", "https://")):
                    raise LiveError("connection failed", "the server redirects to another protocol than HTTP")
        except SourceError as error:
            if not isinstance(error, LiveError) or error.reason == "tls":
                self.refused = error
            raise
        raise LiveError("connection failed", f"the server redirects more than {_MAX_REDIRECTS} times")

    def keep(self, connection: _Connection, url: str) -> None:
        """Store a connection for reuse, after its response was read completely."""
        with self._lock:
            if not self._closed and connection.sock is not None:
                self._idle[_Place.parse(url).origin] = connection
                return
        self.discard(connection)

    def discard(self, connection: _Connection) -> None:
        """Close an HTTP connection that cannot be reused."""
        with self._lock:
            self._connections.discard(connection)
        connection.close()
        connection.opened.close()

    def _ask(self, place: _Place, wanted: str) -> tuple[http.client.HTTPResponse, _Connection]:
        if place.credentials is not None:
            self._credentials.setdefault(place.origin, place.credentials)
        credentials = self._credentials.get(place.origin)
        response, connection = self._exchange(place, wanted, credentials)
        challenges = response.headers.get_all("WWW-Authenticate", [])
        if response.status == 401 and credentials is not None and credentials.challenge(challenges):
            self.discard(connection)
            response, connection = self._exchange(place, wanted, credentials)
        return response, connection

    def _exchange(
        self, place: _Place, wanted: str, credentials: Credentials | None
    ) -> tuple[http.client.HTTPResponse, _Connection]:
        with self._lock:
            kept = self._idle.pop(place.origin, None)
        if kept is not None:
            self._dialer.allow(place.url, [kept.numeric])
            kept.opened.settimeout(self._answer_s)
            try:
                return self._get(kept, place, wanted, credentials), kept
            except (OSError, http.client.HTTPException):  # the server has closed the idle connection
                self.discard(kept)
        connection = None
        try:
            connection = _Connection(place, self._dialer, self._answer_s)
            with self._lock:
                self._connections.add(connection)
                if self._closed:
                    raise LiveError("connection failed", "closed")
            return self._get(connection, place, wanted, credentials), connection
        except BaseException as error:
            if connection is not None:
                self.discard(connection)
            if isinstance(error, TimeoutError):
                raise LiveError("timeout", f"{redact(place.url)} does not answer") from None
            if isinstance(error, OSError | http.client.HTTPException | UnicodeError):
                why = getattr(error, "strerror", None) or type(error).__name__
                raise LiveError("connection failed", f"{redact(place.url)}: {why}") from None
            raise

    def _get(
        self, connection: _Connection, place: _Place, wanted: str, credentials: Credentials | None
    ) -> http.client.HTTPResponse:
        described = Request(place.url)
        self._cookies.add_cookie_header(described)
        headers = {"User-Agent": "saccade", "Accept": "*/*", "Range": wanted, **dict(described.header_items())}
        if authorization := credentials.authorization("GET", place.path) if credentials else None:
            headers["Authorization"] = authorization
        target = place.path
        if connection.proxy is not None:
            scheme, _, rest = place.url.partition("://")
            host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
            target = f"{scheme}://{host}{target}"
            if connection.proxy.authorization:
                headers["Proxy-Authorization"] = connection.proxy.authorization
        connection.putrequest("GET", target, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        self._cookies.extract_cookies(response, described)
        connection.opened.settimeout(self._silence_s)
        return response


class HttpFile:
    """A file over HTTP. The constructor opens it.

    Attributes:
        url: URL of the file after redirects.
        content_type: media type in lower case, without parameters; "" if the server sends none.
        is_playlist: whether the file is an HLS playlist.

    Args:
        files: opens the connections.
        url: URL of the file.
        begin, end: byte range to read; up to the end of the file if `end` is 0.
        nested: whether a playlist names the file. A failed read then ends the file instead of raising `LiveError`.

    Raises:
        LiveError: if the file cannot be opened.
        SourceError: if an address is forbidden.
    """

    def __init__(self, files: HttpFiles, url: str, begin: int = 0, end: int = 0, *, nested: bool = False) -> None:
        self._files = files
        self._asked = url
        self._begin = begin
        self._end = end
        self._nested = nested
        self._at = 0  # position in the response, counted from `begin`
        self._wanted = 0  # position of the next read
        self._head = b""  # bytes read ahead by `peek`
        self._text: bytes | None = None
        self._response, self._connection, self.url = files.request(url, begin, end)
        headers = self._response.headers
        self.content_type = headers.get_content_type() if "Content-Type" in headers else ""
        path = urlsplit(self.url).path.lower()
        self.is_playlist = self.content_type in _PLAYLISTS or path.endswith((".m3u8", ".m3u"))
        partial = self._response.status == 206
        self._seekable = partial or self._response.getheader("Accept-Ranges", "").strip().lower() == "bytes"
        length = self._response.length
        self._length = None if length is None else length - (0 if partial else begin)
        if end and not partial:  # the server ignores the range
            self._length = min(end - begin, self._length or end - begin)
        try:
            if begin and not partial:
                self._skip(begin, _MAX_DISCARDED)
            if self.is_playlist and self.url != url:
                self._text = _with_whole_addresses(self._read_all(), self.url)
                self._length = len(self._text)
        except BaseException:
            files.discard(self._connection)
            raise

    @property
    def length(self) -> int | None:
        """Size of the HTTP file in bytes; None if the server does not state it."""
        return self._length

    def readable(self) -> bool:
        """Return True: a file over HTTP is readable."""
        return True

    def seekable(self) -> bool:
        """Return whether the file supports `seek`: the server accepts range requests, or the file is a small MP4."""
        if self._text is not None or self._length is None:
            return self._text is not None
        return (
            self._seekable
            or (  # an MP4 often has its index at the end; a small one is simply downloaded again
                not self._nested and self._length <= _MAX_DISCARDED and self.peek(_HEAD)[4:8] == b"ftyp"
            )
        )

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes of the HTTP file; return b"" at its end.

        Raises:
            LiveError: if the connection fails and `nested` is False (see `HttpFile`).
            SourceError: if an address is forbidden.
        """
        try:
            if self._text is not None:
                data = self._text[self._wanted : self._wanted + size]
                self._wanted += len(data)
                return data
            if self._wanted < len(self._head):
                data = self._head[self._wanted : self._wanted + size]
                self._wanted += len(data)
                return data
            if self._length is not None and self._wanted >= self._length:
                return b""
            if self._wanted != self._at:
                self._move()
            data = self._receive(size if self._length is None else min(size, self._length - self._at))
        except LiveError as error:
            if not self._nested or error is self._files.refused:
                raise
            self._files.failure = error
            return b""
        self._at += len(data)
        self._wanted = self._at
        return data

    def peek(self, size: int) -> bytes:
        """Return the first bytes of the file without consuming them, at most `size`. Call it before `read`.

        Raises:
            LiveError: if the connection fails.
        """
        if self._text is not None:
            return self._text[:size]
        self._head = self._head or self._receive(size)
        self._at = len(self._head)
        return self._head

    def read_without_end(self) -> None:
        """Treat the file as an endless stream: ignore `Content-Length`, and wait for data without a timeout."""
        self._response.length = None
        self._length = None
        self._connection.opened.settimeout(None)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read in bytes, like `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._wanted, io.SEEK_END: self._length or 0}[whence]
        self._wanted = max(0, base + offset)
        return self._wanted

    def tell(self) -> int:
        """Return the position of the next read, in bytes."""
        return self._wanted

    def close(self) -> None:
        """Close the HTTP file. Its connection is reused if the response was read completely."""
        response = self._response
        read = response.isclosed() or response.length == 0
        response.close()
        if read and not response.will_close:
            self._files.keep(self._connection, self.url)
        else:
            self._files.discard(self._connection)

    def _move(self) -> None:
        """Move to the position of the next read, by skipping bytes of the response or by sending a new request."""
        ahead = self._wanted - self._at
        if 0 < ahead <= _SKIPPED:
            self._skip(ahead, _SKIPPED)
        else:
            self.close()
            self._response, self._connection, _ = self._files.request(
                self._asked, self._begin + self._wanted, self._end
            )
            if self._response.status != 206:
                self._skip(self._begin + self._wanted, _MAX_DISCARDED)
        self._at = self._wanted

    def _skip(self, count: int, most: int) -> None:
        if count > most:
            raise LiveError("connection failed", f"{redact(self.url)}: the server does not support range requests")
        while count and (data := self._receive(min(count, 64 << 10))):
            count -= len(data)

    def _read_all(self) -> bytes:
        pieces = []
        while data := self._receive(64 << 10):
            pieces.append(data)
            if sum(map(len, pieces)) > _MAX_PLAYLIST:
                raise LiveError("connection failed", f"{redact(self.url)}: the playlist is too large")
        return b"".join(pieces)

    def _receive(self, size: int) -> bytes:
        try:
            data = self._response.read1(size)
        except TimeoutError:
            raise LiveError("timeout", f"{redact(self.url)}: the server stopped sending data") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise LiveError("connection failed", f"{redact(self.url)}: {why}") from None
        if not data and self._response.length:
            raise LiveError("connection failed", f"{redact(self.url)}: the server closed the connection")
        return data


class _Decrypted:
    """Decrypts an HLS segment while it is read: AES-128 in CBC mode with PKCS #7 padding."""

    def __init__(self, file: HttpFile, key: bytes, iv: bytes) -> None:
        self._file = file
        self._decryptor = Cipher(algorithms.AES(key), modes.CBC(iv)).decryptor()
        self._coded = b""  # encrypted bytes of an incomplete block
        self._clear = b""  # the last block, which may be padding
        self._ended = False

    def read(self, size: int) -> bytes:
        """Read up to `size` decrypted bytes; return b"" at the end of the segment."""
        while not self._ended and len(self._clear) <= _BLOCK:
            data = self._file.read(max(size, _BLOCK))
            self._coded += data
            whole = len(self._coded) - len(self._coded) % _BLOCK
            self._clear += self._decryptor.update(self._coded[:whole])
            self._coded = self._coded[whole:]
            if not data:
                self._ended = True
                padding = self._clear[-1] if self._clear else 0
                if 0 < padding <= _BLOCK:
                    self._clear = self._clear[:-padding]
        ready = len(self._clear) if self._ended else len(self._clear) - _BLOCK
        data, self._clear = self._clear[: min(size, ready)], self._clear[min(size, ready) :]
        return data

    def close(self) -> None:
        self._file.close()


def _proxy_of(secure: bool, host: str) -> HttpProxy | None:
    """Return the proxy from the environment variables `http_proxy`, `https_proxy` and `no_proxy`, or None."""
    known = getproxies()
    url = (known.get("https") if secure else None) or known.get("http")
    if not url or proxy_bypass(host):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        name, port = parts.hostname, parts.port or 80
    except ValueError:
        name = None
    if not name or parts.scheme != "http":
        raise LiveError("connection failed", f"{redact(url)} is not a proxy such as http://host:3128")
    login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    basic = f"Basic {base64.b64encode(login.encode()).decode()}" if parts.username else ""
    return HttpProxy(name, port, basic)


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address.strip())
    except ValueError:
        raise LiveError("connection failed", f"{redact(base)} contains or redirects to an invalid address") from None


def _with_whole_addresses(playlist: bytes, url: str) -> bytes:
    """Replace the relative URLs in an HLS playlist with absolute URLs. `url` is the URL of the playlist."""
    lines = []
    for line in playlist.decode("utf-8", "surrogateescape").splitlines():
        if line.startswith("#"):
            line = _URI.sub(lambda match: f'{match[1]}{_joined(url, match[2])}"', line)
        elif line.strip():
            line = _joined(url, line)
        lines.append(line)
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")


def _explained(response: http.client.HTTPResponse, shown: str, has_credentials: bool) -> LiveError:
    """Convert an HTTP error response to a `LiveError`."""
    if response.status in (401, 403):
        return LiveError(
            "auth failed", f"{shown}: the server rejects the user name or password", refused=has_credentials
        )
    if response.status in (404, 410):
        return LiveError("not found", f"{shown}: the server has no such file; check the path")
    phrase = re.sub(r"[^ -~]", "", response.reason or "")[:80]
    return LiveError("connection failed", f"{shown}: the server answers {response.status} {phrase}".rstrip())
