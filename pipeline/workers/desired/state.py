"""What is to run, whatever runs: streams with their rules, and settings such as tokens. Pure values, without a clock.

A supervisor compares it with what its workers have, and goes on until both are the same. Knows no workers, files or
networks; `file` keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from saccade.pipeline.config.stream_names import check_name

Config = Mapping[str, Any]
"""The configuration of a stream, as the values of a `ListedStream`: its source, prompts, zones, rules, sinks."""


@dataclass(slots=True, frozen=True)
class Difference:
    """What must be done to come from one state to another; each has names of streams in their order there."""

    open: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    close: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.open or self.change or self.close)


@dataclass(slots=True, frozen=True)
class DesiredState:
    """What is to run. Every change makes a new one, of the next revision, and leaves this as it is.

    Attributes:
        revision: how often it was changed.
        streams: the configuration of each stream by its name, in the order in which they were added.
        settings: what else must outlive a process, by name: texts, numbers, lists and objects of JSON.
    """

    revision: int = 0
    streams: Mapping[str, Config] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", MappingProxyType(dict(self.streams)))
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def with_stream(self, name: str, config: Config) -> Self:
        """With a stream, or another configuration of one; the same state if that changes nothing.

        Raises:
            ValueError: if the name cannot be one, or the configuration is not JSON.
        """
        plain = _plain({**config, "name": check_name(name)})
        if self.streams.get(name) == plain:
            return self
        return replace(self, revision=self.revision + 1, streams={**self.streams, name: plain})

    def without_stream(self, name: str) -> Self:
        """Without a stream; the same state if there is none of that name."""
        if name not in self.streams:
            return self
        rest = {other: config for other, config in self.streams.items() if other != name}
        return replace(self, revision=self.revision + 1, streams=rest)

    def with_setting(self, name: str, value: Any) -> Self:
        """With a setting, or without it where the value is None; the same state if that changes nothing.

        Raises:
            ValueError: if the value is not JSON.
        """
        plain = _plain(value)
        if self.settings.get(name) == plain:
            return self
        rest = {other: known for other, known in self.settings.items() if other != name}
        return replace(
            self, revision=self.revision + 1, settings=rest if value is None else {**self.settings, name: plain}
        )

    def difference(self, running: Mapping[str, Config]) -> Difference:
        """What must be done so that this runs instead of `running`."""
        return Difference(
            tuple(name for name in self.streams if name not in running),
            tuple(name for name, config in self.streams.items() if name in running and running[name] != config),
            tuple(name for name in running if name not in self.streams),
        )


def _plain(value: Any) -> Any:
    """A value as it comes back from JSON; raises ValueError if it cannot be written as such."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {error}") from None
