"""Addresses of live sources: what kind they are, what to call them, and how to print them without their secrets.

Pure text. Knows nothing of connections.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from sources.base import SourceError

_DEFAULT_PORTS = {"rtsp": 554, "rtsps": 322}


def redact(text: str) -> str:
    """`text` without the user names, passwords and keys of the addresses in it.

    Everything up to the last `@` goes, since passwords with `/` and `@` in them are typed unquoted all the time; values
    of keys such as `password=` and `token=` become `***`.
    """
    text = re.sub(r"(?<=://)\S*@", "", text)
    return re.sub(r"(?i)((?:pass(?:word|wd)?|pwd|token|secret|key|auth)=)[^&\s;]+", r"\1***", text)


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
        credentials = ""
        if "@" in rest.partition("/")[0]:
            # Up to the last one, as in `redact`: a password with `@` and `/` in it, typed unquoted, is still clear.
            credentials, _, rest = rest.rpartition("@")
        try:
            parts = urlsplit(f"{scheme.lower()}://{rest}")
            port = parts.port or _DEFAULT_PORTS[parts.scheme]
            host = parts.hostname
        except (ValueError, KeyError):
            host = None
        if not host:
            raise SourceError(
                f"{redact(text)} is no RTSP address (rtsp://user:password@host:554/path); "
                "write special characters of a password as %XX, / as %2F"
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
