"""Searches stored events by a text. SQL selects candidates, and a model scores the snapshot of each candidate.

A model that can answer questions returns the probability that a snapshot matches the text. A detection-only model
detects the labels in the text instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.engine.core.admission import StreamSettings
from saccade.engine.errors import UnknownClassError
from saccade.engine.results import Result
from saccade.engine.tasks import Detect, Query
from saccade.engine.tasks.task import Task
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.storage.store_reader import EventQuery, EventReader

if TYPE_CHECKING:
    from saccade.engine import Engine

CANDIDATES = 200
"""Maximum number of candidates in one search."""
REQUESTED = 50
"""Maximum number of candidates in a search over HTTP."""
AT_ONCE = 4
"""Number of snapshots in flight on a GPU. A CPU gets one at a time, because a frame would wait for all of them."""

_STREAM = "searches"  # name of the engine stream for searches
_WEIGHT = 0.25  # weight relative to a camera, so that searches do not delay frames
_LONG_S = 120.0  # time limit of the engine for one snapshot
_YES = "yes"
_LEAST = 0.05  # lowest score of a detection that counts

Progress = Callable[[int, int], None]
"""Progress callback (snapshots scored, total snapshots)."""


@dataclass(slots=True, frozen=True)
class Place:
    """Location of an event's snapshot.

    Attributes:
        event: ID of the event.
        machine: name of the machine that stores the snapshot; "" if all snapshots are on one machine.
    """

    event: str
    machine: str = ""


Walk = Callable[[EventQuery], Iterator[tuple[dict[str, Any], str]]]
"""Yields the records of all events that match a query, newest first, each with the name of its machine. The limit of
the query is ignored."""

Match = Callable[[str, Sequence[Place]], Iterator[tuple[str, float | None]]]
"""Yields each event ID with the probability that its snapshot matches a text, in any order. The probability is None for
an event without a snapshot."""


@dataclass(slots=True, frozen=True)
class Found:
    """An event found by a search, and the probability that it matches the text, from 0 to 1."""

    event: dict[str, Any]
    p_yes: float

    def to_json(self) -> dict[str, Any]:
        """Return the record of the found event, with the match probability (0 to 1) under the key `match`."""
        return {**self.event, "match": round(self.p_yes, 3)}


@dataclass(slots=True, frozen=True)
class Searched:
    """The events that a search has found, best match first, and the names of machines that could not be searched."""

    found: list[Found]
    away: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the search results in the format of the HTTP API."""
        return {"events": [one.to_json() for one in self.found], **({"away": self.away} if self.away else {})}


def search_events(
    store: EventReader,
    engine: Engine,
    text: str,
    query: EventQuery | None = None,
    *,
    candidates: int = CANDIDATES,
    progress: Progress = lambda done, of: None,
) -> list[Found]:
    """Search a local event store for events whose snapshot matches a text.

    Args:
        store: the event store.
        engine: the engine that scores the snapshots.
        text: text to search for, such as "red truck".
        query: filters for events. `query.limit` is the maximum number of results.
        candidates: maximum number of snapshots to score.
        progress: called after each scored snapshot.

    Returns:
        The results, best match first. Events without a snapshot are not included.

    Raises:
        ConfigError: if the text is empty, or a detection-only model has no label for the text.
        EngineError: if the model fails.
    """
    ask = SnapshotAsker(engine, lambda event: store.media(event, "snapshot"))
    return search(
        lambda wanted: ((record, "") for record, _ in store.walk(wanted)),
        lambda text, places: ask.match(text, [place.event for place in places]),
        text,
        query or EventQuery(),
        candidates=candidates,
        progress=progress,
    )


def search(
    walk: Walk,
    match: Match,
    text: str,
    query: EventQuery,
    *,
    candidates: int,
    progress: Progress = lambda done, of: None,
) -> list[Found]:
    """Return the events whose snapshot matches a text best. See `search_events`.

    `walk` lists events, and `match` scores their snapshots.

    Raises:
        ConfigError: if the text is empty.
    """
    if not text.strip():
        raise ConfigError("the search text is empty: give a text such as 'red truck'")
    chosen = _candidates(walk, text, query, candidates)
    likely: dict[str, float] = {}
    places = [Place(event["id"], machine) for event, machine in chosen]
    for number, (event, p_yes) in enumerate(match(text, places), 1):
        if p_yes is not None:
            likely[event] = p_yes
        progress(number, len(chosen))
    found = [Found(event, likely[event["id"]]) for event, _ in chosen if event["id"] in likely]
    found.sort(key=lambda one: -one.p_yes)  # a stable sort: among equals, events with the words come first
    return found[: query.limit]


def _candidates(walk: Walk, text: str, query: EventQuery, count: int) -> list[tuple[dict[str, Any], str]]:
    events: dict[str, tuple[dict[str, Any], str]] = {}
    for words in (f"{query.words} {text}", query.words):
        if len(events) >= count:  # a walk requests a page from all machines before its first event
            break
        for event, machine in walk(replace(query, words=words, limit=min(count, 200), media=True)):
            if event["has_snapshot"]:
                events.setdefault(event["id"], (event, machine))
            if len(events) >= count:
                break
    return list(events.values())


class SnapshotAsker:
    """Scores snapshots of events by a text, with the model of an engine. Thread-safe.

    The engine prioritizes live streams over searches.

    Args:
        engine: the engine. The caller closes it.
        snapshot: returns the path of an event's snapshot, or None.
    """

    def __init__(self, engine: Engine, snapshot: Callable[[str], Path | None]) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._at_once = 1 if engine.model.device == "cpu" else AT_ONCE
        engine.configure_stream(_STREAM, StreamSettings(_WEIGHT, newest=False))

    def match(self, text: str, events: Iterable[str]) -> Iterator[tuple[str, float | None]]:
        """For each event ID, yield the ID and the probability (0 to 1) that the event's snapshot matches the text.

        The probability is None if the snapshot cannot be read.

        Raises:
            ConfigError: if a detection-only model has no label for the text.
            EngineError: if the model fails.
        """
        tasks = self._tasks_for(text)
        waiting: deque[tuple[str, Future[Result] | None]] = deque()

        def taken() -> tuple[str, float | None]:
            event, future = waiting.popleft()
            return event, None if future is None else _likelihood(future.result(_LONG_S))

        try:
            for event in events:
                image = _read(self._snapshot(event))
                asked = None if image is None else self._engine.submit(image, tasks, stream=_STREAM)
                waiting.append((event, asked))
                if len(waiting) >= self._at_once:
                    yield taken()
            while waiting:
                yield taken()
        finally:
            for _, future in waiting:
                if future is not None:
                    future.cancel()

    def _tasks_for(self, text: str) -> list[Task]:
        """Convert a search text to a task: a yes-or-no question, or detection if the model cannot answer questions."""
        if "query" in self._engine.model.skills:
            return [Query(f"Does this image show {text.strip()}?", choices=(_YES, "no"))]
        tasks: dict[Task, None] = {}
        for name in (text.strip(), *text.split()):
            try:
                tasks |= dict.fromkeys(self._engine.expand(Detect(name, conf=_LEAST)))
            except UnknownClassError as error:
                reason = error
            if tasks:
                return list(tasks)
        raise ConfigError(f"{self._engine.model.name} cannot search for '{text}': {reason}")


def _likelihood(result: Result) -> float:
    if result.texts:
        text = result.texts[0]
        return (text.probabilities or {}).get(_YES, 1.0 if text.text == _YES else 0.0)
    return max((box.score for box in result.detections.boxes), default=0.0)


def _read(path: Path | None) -> NDArray[np.uint8] | None:
    image = None if path is None or not path.is_file() else cv2.imread(str(path))  # imread warns about missing files
    return None if image is None else np.ascontiguousarray(image[..., ::-1].astype(np.uint8))
