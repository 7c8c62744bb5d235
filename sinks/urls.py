"""Parses the target of a sink: an address or path and the options behind it; and shows it without its secrets.

Pure text. Knows nothing of files or connections.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

from saccade.addresses import with_plain_zone
from saccade.sinks.base import SinkError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = "a time such as 90, 10m, 1h or 7d"
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_CREDENTIALS = re.compile(r"(\w+:/?)?[^/:@\s]+:[^/\s]*@")  # of an address without its beginning, or a part of that
_HOST = re.compile(r"([^\s:@\[\]]*|\[[^\]]*\])(:\d*)?")
_HOST_OR_USER = re.compile(r"(?!localhost:)[^\s:@\[\].]+:\d+[/?#].*@")  # and its port, or a password such as 1/x


def redact_target(text: str) -> str:
    """A target as logs may show it: of an address only `scheme://host:port`, since paths hold keys as well."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _CREDENTIALS.sub(r"\1***@", text)
    if _HOST_OR_USER.match(rest):
        return f"{scheme}://***"
    for place in (rest, rest.rpartition("@")[2]):  # the second: a password with an unescaped /, ? or #
        host = re.split(r"[/?#]", place, maxsplit=1)[0].rpartition("@")[2]
        if _HOST.fullmatch(host):
            return f"{scheme}://{host}"
    return f"{scheme}://***"


class Options:
    """The options of a target, `name=value&name=value`; each is read by name, and `reject_unknown` refuses the rest.

    Args:
        text: the options.
        target: what they belong to, free of secrets, for messages.

    Raises:
        SinkError: by every method, if an option has a wrong value.
    """

    def __init__(self, text: str, target: str) -> None:
        self._target = target
        self._pairs = parse_qsl(text, keep_blank_values=True)
        self._given = dict(self._pairs)
        self._known: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._given)

    def text(self, name: str, default: str = "") -> str:
        """The option as it was given."""
        self._known.append(name)
        return self._given.get(name, default)

    def texts(self, name: str) -> list[str]:
        """The values of an option that may be repeated; empty when absent."""
        self._known.append(name)
        return [value for key, value in self._pairs if key == name]

    def flag(self, name: str) -> bool:
        """A switch, off by default: 1, true, yes or on; 0, false, no or off."""
        value = self.text(name, "0").lower()
        if value not in _YES + _NO:
            raise self._wrong_value(name, value, "0 or 1")
        return value in _YES

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """One of `allowed`, by default the first."""
        value = self.text(name, allowed[0])
        if value not in allowed:
            raise self._wrong_value(name, value, " or ".join(allowed))
        return value

    def count(self, name: str, default: int, most: int = 10**9) -> int:
        """A whole number from 1 to `most`."""
        value = self.text(name, str(default))
        if not re.fullmatch(r"\d{1,10}", value) or not 1 <= int(value) <= most:
            raise self._wrong_value(name, value, f"a whole number from 1 to {most}")
        return int(value)

    def number(self, name: str) -> float | None:
        """A number above 0; None when absent."""
        value = self.text(name)
        if not value and name not in self._given:
            return None
        return self._positive(name, value, value, "a number above 0")

    def seconds(self, name: str, default: float) -> float:
        """A time above 0: `90`, `90s`, `10m`, `1h` or `7d`, in seconds."""
        return self._seconds(name, self.text(name, f"{default:g}"), _TIME)

    def count_or_age(self, name: str, most: int) -> tuple[int | None, float | None]:
        """A whole number from 1 to `most`, or a time with its unit, in seconds; None for what it is not."""
        value = self.text(name)
        if name not in self._given:
            return None, None
        if re.fullmatch(r"\d{1,10}", value) and 1 <= int(value) <= most:
            return int(value), None
        return None, self.age(name, f"a whole number from 1 to {most}, or a time such as 12h or 7d")

    def age(self, name: str, shape: str = "a time such as 12h or 7d") -> float | None:
        """A time with its unit, such as `12h` or `7d`, in seconds; None when absent."""
        value = self.text(name)
        if name not in self._given:
            return None
        if not value[-1:].isalpha():
            raise self._wrong_value(name, value, shape)
        return self._seconds(name, value, shape)

    def reject_unknown(self) -> None:
        """Refuse the options that have not been read."""
        for name in self._given:
            if name not in self._known:
                near = difflib.get_close_matches(name, self._known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(self._known) or 'none'}"
                raise SinkError(f"{self._target}: unknown option '{name}'; {hint}")

    def _seconds(self, name: str, value: str, shape: str) -> float:
        found = re.fullmatch(r"([\d.]+)([smhd]?)", value)
        if found is None:
            raise self._wrong_value(name, value, shape)
        return self._positive(name, value, found[1], shape) * _UNITS[found[2]]

    def _positive(self, name: str, value: str, digits: str, shape: str) -> float:
        try:
            number = float(digits)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise self._wrong_value(name, value, shape)
        return number

    def _wrong_value(self, name: str, value: str, shape: str) -> SinkError:
        return SinkError(f"{self._target}: {name} should be {shape}, not {value!r}")


def split_path(text: str, suffixes: Sequence[str]) -> tuple[str, Options]:
    """A file's path and the options behind it; a `?` belongs to the path unless what is before it ends in a suffix."""
    path, mark, options = text.rpartition("?")
    if not mark or not path.lower().endswith(tuple(suffixes)):
        path, options = text, ""
    return path, Options(options, path)


@dataclass(slots=True, frozen=True, repr=False)
class Address:
    """A server's address, parsed.

    Attributes:
        scheme: in small letters.
        host, port: where to connect.
        user, password: decoded; None when the address holds none.
        path: what follows the host, decoded, without slashes around it.
        shown: the address without its secrets.
    """

    scheme: str
    host: str
    port: int
    user: str | None
    password: str | None
    path: str
    shown: str

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    @classmethod
    def parse(cls, text: str, ports: dict[str, int], example: str) -> Self:
        """Parse an address.

        Args:
            text: the address, with or without options.
            ports: the default port of each allowed scheme.
            example: a valid address, for the error message.

        Raises:
            SinkError: if it is not valid.
        """
        shown = redact_target(text)
        try:
            parts = urlsplit(with_plain_zone(text))
            port = parts.port if parts.port is not None else ports[parts.scheme]
            host = parts.hostname or ""
            host.encode("idna")  # as the lookup will do
        except (ValueError, KeyError):
            host, port = "", 0
        if not host or re.search(r"\s", host) or not 1 <= port <= 65535:
            raise SinkError(
                f"{shown} is not a valid address: use {example}; write special characters of a password as %XX"
            )
        user, password = parts.username, parts.password
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port,
            user=unquote(user) if user else None,
            password=unquote(password) if password is not None else None,
            path=unquote(parts.path).strip("/"),
            shown=shown,
        )
