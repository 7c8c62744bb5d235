"""What must be done to come from one configuration to another, and how two people's changes come together. Pure.

A change is one of

    Close(name)                   the stream ends
    Update(name, stream, keys)    it runs on, by other values of `LIVE` keys
    Reopen(name, stream, keys)    it ends and is opened again, since a key needs another source, queue or output
    Open(name, stream)            a stream begins

`RunConfig.named` gives the streams that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config import Changes, ListedStream, RunConfig

LIVE = frozenset(Changes.model_fields.keys() | Regions.model_fields.keys()) | {
    "rules", "tiles", "track", "smooth", "motion_area", "motion_mask",
}  # fmt: skip
"""The keys that `Run.update` takes while a stream runs."""


@dataclass(slots=True, frozen=True)
class Open:
    """A stream begins."""

    name: str
    stream: ListedStream


@dataclass(slots=True, frozen=True)
class Update:
    """A stream runs on by other values.

    Attributes:
        keys: those that differ.
    """

    name: str
    stream: ListedStream
    keys: frozenset[str]


@dataclass(slots=True, frozen=True)
class Reopen:
    """A stream ends and is opened again.

    Attributes:
        keys: those that differ; none where somebody asked for it.
    """

    name: str
    stream: ListedStream
    keys: frozenset[str] = frozenset()


@dataclass(slots=True, frozen=True)
class Close:
    """A stream ends."""

    name: str


Change = Open | Update | Reopen | Close


def plan(old: RunConfig, new: RunConfig) -> list[Change]:
    """The changes of streams that lead from one configuration to another: first those that end some, last new ones."""
    before, after = old.named(), new.named()
    closed: list[Change] = [Close(name) for name in before if name not in after]
    kept = [change_of(name, before[name], stream) for name, stream in after.items() if name in before]
    opened: list[Change] = [Open(name, stream) for name, stream in after.items() if name not in before]
    return [*closed, *(change for change in kept if change is not None), *opened]


def change_of(name: str, old: ListedStream, new: ListedStream) -> Update | Reopen | None:
    """What must be done with one stream; None if nothing."""
    keys = differences(old, new)
    if not keys:
        return None
    return Update(name, new, keys) if keys <= LIVE else Reopen(name, new, keys)


def differences(old: ListedStream, new: ListedStream) -> frozenset[str]:
    """The keys of a stream that differ, but for its name."""
    return frozenset(
        key for key in ListedStream.model_fields if key != "name" and getattr(old, key) != getattr(new, key)
    )


def later(old: RunConfig, new: RunConfig) -> list[str]:
    """The keys of the whole run that differ, in order: they hold when Saccade is started again."""
    streams = ListedStream.model_fields.keys() - {"sinks"} | {"streams"}
    return sorted(key for key in RunConfig.model_fields.keys() - streams if getattr(old, key) != getattr(new, key))


def merge(base: RunConfig, edited: RunConfig, desired: RunConfig) -> RunConfig:
    """The desired configuration once a file was edited that people have also changed streams of over HTTP.

    What was changed in the file wins, key by key; what was not stays as it is desired.

    Args:
        base: the file as it was.
        edited: the file as it is.
        desired: the file as it was, with what has been changed since by others.
    """
    before, after, wanted = base.named(), edited.named(), desired.named()
    streams: dict[str, ListedStream] = {}
    for name, stream in wanted.items():
        if name in before and name not in after:
            continue
        streams[name] = _merged(before.get(name), after.get(name), stream)
    for name, stream in after.items():
        if name not in wanted and (name not in before or differences(before[name], stream)):
            streams[name] = stream
    return edited.with_streams(_in_order(streams, list(after)))


def _merged(base: ListedStream | None, edited: ListedStream | None, wanted: ListedStream) -> ListedStream:
    if edited is None:
        return wanted
    if base is None:
        return edited
    keys = differences(base, edited)
    return wanted.model_copy(update={key: getattr(edited, key) for key in keys}) if keys else wanted


def _in_order(streams: Mapping[str, ListedStream], names: list[str]) -> list[ListedStream]:
    """The streams that the file names in its order, and then the others."""
    return [streams[name] for name in names if name in streams] + [
        stream for name, stream in streams.items() if name not in names
    ]
