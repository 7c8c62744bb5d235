"""Addresses of live sources: what kind they are, what to call them, and how to print them without their secrets.

Pure text. Knows nothing of connections.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from saccade.sources.errors import SourceError

_DEFAULT_PORTS = {"rtsp": 554, "rtsps": 322}


def redact(text: str) -> str:
    """`text` without the user names, passwords and keys of the addresses in it.

    Passwords with `/` and `@` in them are typed unquoted all the time, so everything up to the last `@` goes where
    there are credentials; values of keys such as `password=` and `token=` become `***`, but for the … of an example.
    """
    text = re.sub(r"(?<=://)\S+", lambda match: split_credentials(match[0])[1], text)
    return re.sub(r"(?i)((?:pass(?:word|wd)?|pwd|token|secret|key|auth)=)(?!…(?:[&\s;]|$))[^&\s;]+", r"\1***", text)


def split_credentials(rest: str) -> tuple[str, str]:
    """What follows `://`, as credentials, "" for none, and what is left."""
    authority = rest.partition("/")[0]
    if "@" not in authority and not re.search(r":(?!\d*$)", authority):
        return "", rest  # an @ further on belongs to the path
    credentials, _, rest = rest.rpartition("@")
    return credentials, rest


def stream_name(url: str) -> str:
    """A name for the stream at `url`: host and path, with only what is safe in topics and file names."""
    rest = redact(url).partition("://")[2].partition("?")[0]
    return re.sub(r"[^\w.]+", "-", rest).strip("-") or "live"


@dataclass(slots=True, frozen=True)
class RtspAddress:
    """An RTSP address taken apart.

    Attributes:
        url: what is asked for on the wire: the address without credentials.
        host, port: where to connect.
        user, password: decoded; None when the address holds none.
        tls: True for rtsps.
    """

    url: str
    host: str
    port: int
    user: str | None
    password: str | None
    tls: bool

    def __repr__(self) -> str:
        return f"RtspAddress({redact(self.url)!r})"  # a traceback or log must not show the password

    @classmethod
    def parse(cls, text: str) -> RtspAddress:
        """Take an address apart.

        Raises:
            SourceError: if it is none.
        """
        scheme, _, rest = text.partition("://")
        credentials, rest = split_credentials(rest)
        try:
            parts = urlsplit(f"{scheme.lower()}://{rest}")
            port = parts.port or _DEFAULT_PORTS[parts.scheme]
            host = parts.hostname
        except (ValueError, KeyError):
            host = None
        if not host:
            raise SourceError(
                f"{redact(text)} is no RTSP address (rtsp://user:password@host:554/path); "
                "write special characters of a password as %XX, @ as %40"
            )
        user, _, password = credentials.partition(":")
        return cls(
            url=parts._replace(fragment="").geturl(),
            host=host,
            port=port,
            user=unquote(user) if credentials else None,
            password=unquote(password) if credentials else None,
            tls=parts.scheme == "rtsps",
        )
