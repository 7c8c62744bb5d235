"""Parses the target of a sink: an address or a path, followed by options. Removes secrets from targets for logs."""

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
    """Return a sink's target without secrets, for logs. An address is shortened to `scheme://host:port`."""
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
    """The options of a sink's target, in the form `name=value&name=value`.

    Each method reads one option by name. Call `reject_unknown` last: it rejects all options that were not read.

    Args:
        text: options of the target, without the leading `?` or `#`.
        target: the target without secrets, for messages.

    Raises:
        SinkError: by every method, if an option has an invalid value.
    """

    def __init__(self, text: str, target: str) -> None:
        self._target = target
        self._pairs = parse_qsl(text, keep_blank_values=True)
        self._given = dict(self._pairs)
        self._known: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._given)

    def text(self, name: str, default: str = "") -> str:
        """Return the value of an option as text, or `default` if the option is absent."""
        self._known.append(name)
        return self._given.get(name, default)

    def texts(self, name: str) -> list[str]:
        """Return all values of an option that may be repeated; an empty list if it is absent."""
        self._known.append(name)
        return [value for key, value in self._pairs if key == name]

    def flag(self, name: str) -> bool:
        """Return a boolean option, such as `1`, `true`, `0` or `false`. An absent option is False."""
        value = self.text(name, "0").lower()
        if value not in _YES + _NO:
            raise self._wrong_value(name, value, "0 or 1")
        return value in _YES

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """Return the value of an option that must be one of `allowed`. The first allowed value is the default."""
        value = self.text(name, allowed[0])
        if value not in allowed:
            raise self._wrong_value(name, value, " or ".join(allowed))
        return value

    def count(self, name: str, default: int, most: int = 10**9) -> int:
        """Return an option as a whole number from 1 to `most`."""
        value = self.text(name, str(default))
        if not re.fullmatch(r"\d{1,10}", value) or not 1 <= int(value) <= most:
            raise self._wrong_value(name, value, f"a whole number from 1 to {most}")
        return int(value)

    def number(self, name: str) -> float | None:
        """Return an option as a positive number; None if it is absent."""
        value = self.text(name)
        if not value and name not in self._given:
            return None
        return self._positive(name, value, value, "a number above 0")

    def seconds(self, name: str, default: float) -> float:
        """Return an option as a positive duration in seconds. Values look like `90`, `90s`, `10m`, `1h` or `7d`."""
        return self._seconds(name, self.text(name, f"{default:g}"), _TIME)

    def count_or_age(self, name: str, most: int) -> tuple[int | None, float | None]:
        """Parse an option that is a count from 1 to `most`, or a duration with a unit such as `12h` or `7d`.

        Returns:
            (count, None) or (None, duration in seconds); (None, None) if the option is absent.
        """
        value = self.text(name)
        if name not in self._given:
            return None, None
        if re.fullmatch(r"\d{1,10}", value) and 1 <= int(value) <= most:
            return int(value), None
        return None, self.age(name, f"a whole number from 1 to {most}, or a time such as 12h or 7d")

    def age(self, name: str, shape: str = "a time such as 12h or 7d") -> float | None:
        """Return an option as a duration in seconds; None if absent. The value needs a unit, such as `12h` or `7d`."""
        value = self.text(name)
        if name not in self._given:
            return None
        if not value[-1:].isalpha():
            raise self._wrong_value(name, value, shape)
        return self._seconds(name, value, shape)

    def reject_unknown(self) -> None:
        """Raise SinkError if the target contains an option that the sink does not know."""
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
    """Split a target such as `out.jsonl?keep=5` into its path and its options.

    Args:
        text: the target.
        suffixes: file suffixes that can be followed by options. Other targets are paths without options.
    """
    path, mark, options = text.rpartition("?")
    if not mark or not path.lower().endswith(tuple(suffixes)):
        path, options = text, ""
    return path, Options(options, path)


@dataclass(slots=True, frozen=True, repr=False)
class Address:
    """A parsed server address of a sink.

    Attributes:
        scheme: scheme in lower case.
        host, port: host and port to connect to.
        user, password: decoded credentials; None if the address has none.
        path: decoded path without leading and trailing slashes.
        shown: the address without secrets.
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
        """Parse a sink's server address.

        Args:
            text: the address, with or without options.
            ports: the default port of each allowed scheme.
            example: a valid address, for the error message.

        Raises:
            SinkError: if the address is invalid.
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
