"""URLs of live sources: parsing, stream names, and removal of credentials.

Passwords in camera URLs often contain unescaped characters such as @, / or #. The parser finds the intended password.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote, urljoin, urlsplit

from saccade.addresses import with_plain_zone, without_zone
from saccade.sources.errors import SourceError

_DEFAULT_PORTS = {"rtsp": 554, "rtsps": 322}
_SCHEME = re.compile(r"(\b[A-Za-z][\w+.-]+:/{1,3}|\brtsps?:)(?=[^\s/])")
_HOST = re.compile(r"(?P<host>\[[\w:.%~-]+\]|[^\s:/?#@\[\]]+)(?P<port>:\d{0,5})?(?=[/?#\s'\",;)]|$)")
_EXAMPLES = ("user:password", "user:pass", "u:p")
_SECRET = re.compile(
    r"(?i)(\b[\w-]*(?:pass|pas|password|passwd|passphrase|pwd|psw|pw|token|secret|key|auth|sig|signature|credential)=)"
    r"(?!…(?:[&\s;).,]|$))[^&\s;]+"
)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def redact(text: str) -> str:
    """Return a text without the credentials in URLs and without values of keys such as `password=`.

    Placeholders such as `user:password@host` and `token=…` stay unchanged.
    """
    first, *pieces = _SCHEME.split(text)
    shown = [first]
    for scheme, rest in zip(pieces[::2], pieces[1::2], strict=True):
        credentials, left = split_credentials(rest)
        shown += [scheme, rest if credentials.lower() in _EXAMPLES else left]
    return _SECRET.sub(r"\1***", "".join(shown))


def split_credentials(rest: str) -> tuple[str, str]:
    """Split the part of a URL after `://` into the credentials ("" for none) and the rest.

    The password may contain unescaped characters such as @ or /.
    """
    authority = re.match(r"[^\s/?#]*", rest)  # by RFC 3986, the credentials end at the last @ in it
    end = authority.end() if authority else 0
    line = rest.partition("\n")[0]
    token = re.match(r"\S*", line)
    every = [match.start() for match in re.finditer("@", line)]
    inside = [at for at in every if at < end]
    if inside and _is_certain(line, inside[-1] + 1):
        chosen = inside[-1]
    elif inside or (every and not _HOST.match(line)):
        nearby = [at for at in every if not inside or not token or at < token.end()]
        hosts = [at for at in nearby if _HOST.match(line, at + 1)]
        chosen = next((at for at in hosts if _is_certain(line, at + 1)), (hosts or nearby)[-1])
    else:  # a host and its port, or a user and a password that begins with digits and a slash
        inside = [at for at in every if token and at < token.end() and _is_certain(line, at + 1)]
        if not inside or _is_certain(line.partition(":")[0], 0):
            return "", rest
        chosen = inside[-1]
    return rest[:chosen], rest[chosen + 1 :]


def _is_certain(text: str, at: int) -> bool:
    """Return whether a host certainly begins at `at`: an IP address, `localhost`, or a name with a dot or port."""
    match = _HOST.match(text, at)
    if match is None:
        return False
    host = match["host"]
    return len(match["port"] or "") > 1 or host.startswith("[") or host == "localhost" or "." in host


def check_port(url: str) -> None:
    """Check the port in a URL.

    Raises:
        SourceError: if the port is not a number from 1 to 65535.
    """
    match = _HOST.match(split_credentials(url.partition("://")[2])[1])
    if match and not _is_port(match["port"]):
        raise SourceError(f"{redact(url)}: the port must be a number from 1 to 65535")


def host_and_port(url: str) -> tuple[str, int | None]:
    """Return the host and port of a URL as FFmpeg parses it. A missing host is ""; a missing port is None."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None


def _is_port(found: str | None) -> bool:
    """Return whether a port such as ":554" is from 1 to 65535, or missing."""
    digits = (found or "").removeprefix(":")
    return not digits or int(digits) in range(1, 65536)


def stream_name(url: str) -> str:
    """Return a stream name from a URL's host and path. All its characters are allowed in MQTT topics and file names."""
    rest = redact(url).partition("://")[2].partition("?")[0]
    return re.sub(r"[^\w.]+", "-", rest).strip("-") or "live"


@dataclass(slots=True, frozen=True)
class RtspAddress:
    """A parsed RTSP URL.

    Attributes:
        url: the URL without credentials, as sent to the server.
        host, port: host and port to connect to.
        user, password: decoded credentials; None if the URL has none.
        tls: whether the scheme is rtsps.
        default_port: whether the URL has no port.
    """

    url: str
    host: str
    port: int
    user: str | None
    password: str | None
    tls: bool
    default_port: bool = False

    def __repr__(self) -> str:
        return f"RtspAddress({redact(self.url)!r})"  # a traceback or log must not show the password

    @classmethod
    def parse(cls, text: str) -> RtspAddress:
        """Parse an RTSP URL.

        Raises:
            SourceError: if the URL is malformed.
        """
        if _UNSAFE.search(text):
            raise SourceError(f"{redact(_UNSAFE.sub('?', text))} contains control characters; remove them")
        scheme, separator, rest = text.partition("://")
        scheme = scheme.lower()
        credentials, rest = split_credentials(rest)
        rest = with_plain_zone(rest)
        match = _HOST.match(rest)
        host = match["host"].strip("[]") if match else ""
        port = match["port"][1:] if match and match["port"] else ""
        if not (match and separator and scheme in _DEFAULT_PORTS and _is_host(host) and _is_port(match["port"])):
            raise SourceError(
                f"{redact(text)} is not an RTSP URL (rtsp://user:password@host:554/path); "
                "write special characters of a password as %XX, @ as %40"
            )
        path = quote(rest[match.end() :].partition("#")[0], safe="/%:=&?~+!$,;'@()*[]|{}^\"\\<>`")
        user, _, password = credentials.partition(":")
        return cls(
            url=without_zone(f"{scheme}://{match[0]}") + path,
            host=host,
            port=int(port) if port else _DEFAULT_PORTS[scheme],
            user=unquote(user) if credentials else None,
            password=unquote(password) if credentials else None,
            tls=scheme == "rtsps",
            default_port=not port,
        )

    @property
    def with_credentials(self) -> str:
        """The RTSP URL with credentials, for a library that expects them in the URL."""
        if self.user is None:
            return self.with_zone
        login = f"{quote(self.user, safe='')}:{quote(self.password or '', safe='')}"
        return self.with_zone.replace("://", f"://{login}@", 1)

    @property
    def with_zone(self) -> str:
        """The RTSP URL with the zone of a link-local IPv6 address, such as `%eth0`."""
        address, mark, zone = self.host.partition("%")
        return self.url.replace(f"[{address}]", f"[{address}{mark}{zone}]", 1) if mark else self.url

    def redirected(self, location: str) -> RtspAddress:
        """Return the address after a redirect. Credentials are kept for the same host, unless the new URL drops TLS.

        Raises:
            SourceError: if `location` is malformed.
        """
        target = RtspAddress.parse(urljoin(self.url, location.strip()))
        if target.host == self.host.partition("%")[0]:  # a server does not know the zone
            target = replace(target, host=self.host)
        if target.user is None and target.host == self.host and (target.tls or not self.tls):
            target = replace(target, user=self.user, password=self.password)
        return target


def _is_host(text: str) -> bool:
    """Return whether a text is a well-formed host name or IP address."""
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        if ":" in text or "%" in text:
            return False
    try:
        return bool(text.encode("idna")) and not text.startswith("-")
    except UnicodeError:  # an empty label, as in a..b, or one that is too long
        return False
