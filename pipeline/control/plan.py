"""Compares two configurations, and merges concurrent edits.

The result of a comparison is a list of stream changes:
    Close(name)                 the stream stops
    Update(name, stream, keys)  the running stream gets new values; all changed keys can change at run time (`LIVE`)
    Reopen(name, stream, keys)  the stream restarts, because a changed key affects its source, queue or outputs
    Open(name, stream)          a new stream starts

Streams are matched by their names in `RunConfig.named`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config import Changes, ListedStream, RunConfig

LIVE = frozenset(Changes.model_fields.keys() | Regions.model_fields.keys()) | {
    "rules", "tiles", "track", "smooth", "motion_area", "motion_mask",
}  # fmt: skip
"""The keys that `Run.update` can change in a running stream."""


@dataclass(slots=True, frozen=True)
class Open:
    """A change that starts a new stream."""

    name: str
    stream: ListedStream


@dataclass(slots=True, frozen=True)
class Update:
    """A change that applies new settings to a running stream.

    Attributes:
        keys: the changed keys.
    """

    name: str
    stream: ListedStream
    keys: frozenset[str]


@dataclass(slots=True, frozen=True)
class Reopen:
    """A change that restarts a stream.

    Attributes:
        keys: the changed keys; empty if a user requested the restart.
    """

    name: str
    stream: ListedStream
    keys: frozenset[str] = frozenset()


@dataclass(slots=True, frozen=True)
class Close:
    """A change that stops a stream."""

    name: str


Change = Open | Update | Reopen | Close


def plan(old: RunConfig, new: RunConfig) -> list[Change]:
    """Return the changes that lead from one configuration to another. Streams are stopped first and opened last."""
    before, after = old.named(), new.named()
    closed: list[Change] = [Close(name) for name in before if name not in after]
    kept = [change_of(name, before[name], stream) for name, stream in after.items() if name in before]
    opened: list[Change] = [Open(name, stream) for name, stream in after.items() if name not in before]
    return [*closed, *(change for change in kept if change is not None), *opened]


def change_of(name: str, old: ListedStream, new: ListedStream) -> Update | Reopen | None:
    """Return the change that leads from one configuration of a stream to another. Return None if nothing changes."""
    keys = differences(old, new)
    if not keys:
        return None
    return Update(name, new, keys) if keys <= LIVE else Reopen(name, new, keys)


def differences(old: ListedStream, new: ListedStream) -> frozenset[str]:
    """Return the keys that have different values in two stream configurations. The name is not compared."""
    return frozenset(
        key for key in ListedStream.model_fields if key != "name" and getattr(old, key) != getattr(new, key)
    )


def later(old: RunConfig, new: RunConfig) -> list[str]:
    """Return the names of changed settings that take effect only after a restart of Saccade, sorted."""
    streams = ListedStream.model_fields.keys() - {"sinks"} | {"streams"}
    return sorted(key for key in RunConfig.model_fields.keys() - streams if getattr(old, key) != getattr(new, key))


def merge(base: RunConfig, edited: RunConfig, desired: RunConfig) -> RunConfig:
    """Merge an edited configuration file with changes that were made over HTTP.

    If both changed the same key, the value from the file is used. All other keys have their values from `desired`.

    Args:
        base: the file before the edit.
        edited: the file after the edit.
        desired: `base` with all changes made over HTTP.
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
    """Sort streams by their order in the configuration file. Streams that are not in the file come last."""
    return [streams[name] for name in names if name in streams] + [
        stream for name, stream in streams.items() if name not in names
    ]
