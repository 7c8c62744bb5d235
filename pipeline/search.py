"""Finds stored events by asking a model: SQL chooses candidates, the model is asked about their snapshots.

A model that answers questions says for each how likely the text is true of it; one that detects only, such as nano,
finds the names in it. Both may be elsewhere: `search` knows functions that list and that ask, `search_events` a store
and an engine. No terminals, no HTTP.
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
"""Events that the model is asked about in one search."""
REQUESTED = 50
"""Those that it is asked about for a request over HTTP."""
AT_ONCE = 4
"""Snapshots that an engine has at a time, on a GPU; on a CPU a frame would wait for all of them."""

_STREAM = "searches"  # to the engine, which shares itself among streams
_WEIGHT = 0.25  # of one stream's: no frame is late since someone searches
_LONG_S = 120.0  # that the engine may take for one
_YES = "yes"
_LEAST = 0.05  # of a detection that counts

Progress = Callable[[int, int], None]
"""Called with (done, all)."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where the snapshot of an event is: its id, and the machine whose store has it, "" where there is one only."""

    event: str
    machine: str = ""


Walk = Callable[[EventQuery], Iterator[tuple[dict[str, Any], str]]]
"""The records of all events of a query, whatever its limit, newest first, each with its machine as in `Place`."""

Match = Callable[[str, Sequence[Place]], Iterator[tuple[str, float | None]]]
"""Asks about snapshots whether they show a text; yields the id of each event and how likely it does, in any order, as
soon as it is known; None where there is no snapshot to be had."""


@dataclass(slots=True, frozen=True)
class Found:
    """An event, and how likely it shows what was searched for, 0 to 1."""

    event: dict[str, Any]
    p_yes: float

    def to_json(self) -> dict[str, Any]:
        """The record of the event, with `match`."""
        return {**self.event, "match": round(self.p_yes, 3)}


@dataclass(slots=True, frozen=True)
class Searched:
    """What a search has found: the likeliest first; and the machines whose events it could not ask about."""

    found: list[Found]
    away: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As it is sent over HTTP."""
        return {"events": [one.to_json() for one in self.found], **({"away": self.away} if self.away else {})}


def search_events(
    store: EventReader,
    engine: Engine,
    text: str,
    query: EventQuery | None = None,
    *,
    candidates: int = CANDIDATES,
    progress: Progress | None = None,
) -> list[Found]:
    """Ask a model which events of a store show something.

    Args:
        store: of the events.
        engine: is asked.
        text: as all that follows, as in `search`.
        query: which events count.
        candidates: how many are asked about.
        progress: called whenever one was.

    Returns:
        As `search`.

    Raises:
        ConfigError: if there is nothing to search for, or the model knows no name in it.
        EngineError: if the model fails.
    """
    ask = SnapshotAsker(engine, lambda event: store.media(event, "snapshot"))
    return search(
        lambda wanted: ((record, "") for record, _ in store.walk(wanted)),
        lambda text, places: ask.match(text, [place.event for place in places]),
        text,
        query,
        candidates=candidates,
        progress=progress,
    )


def search(
    walk: Walk,
    match: Match,
    text: str,
    query: EventQuery | None = None,
    *,
    candidates: int = CANDIDATES,
    progress: Progress | None = None,
) -> list[Found]:
    """Ask which stored events show something.

    Args:
        walk: lists events.
        match: asks about their snapshots.
        text: what is searched for, such as a red truck.
        query: which events count; its `limit` is how many are returned.
        candidates: how many are asked about: first those with the words in labels, answers or attributes, then the
            newest others.
        progress: called whenever one was asked about.

    Returns:
        The likeliest first; those whose snapshot is gone are left out.

    Raises:
        ConfigError: if there is nothing to search for; and what `match` raises.
    """
    wanted = query or EventQuery()
    if not text.strip():
        raise ConfigError("nothing to search for: give a text such as 'red truck'")
    chosen = _candidates(walk, text, wanted, candidates)
    likely: dict[str, float] = {}
    places = [Place(event["id"], machine) for event, machine in chosen]
    for number, (event, p_yes) in enumerate(match(text, places), 1):
        if p_yes is not None:
            likely[event] = p_yes
        if progress is not None:
            progress(number, len(chosen))
    found = [Found(event, likely[event["id"]]) for event, _ in chosen if event["id"] in likely]
    found.sort(key=lambda one: -one.p_yes)  # which keeps the order of equals: events with the words first
    return found[: wanted.limit]


def _candidates(walk: Walk, text: str, query: EventQuery, count: int) -> list[tuple[dict[str, Any], str]]:
    events: dict[str, tuple[dict[str, Any], str]] = {}
    for words in (f"{query.words} {text}", query.words):
        if len(events) >= count:  # a walk asks all machines for a page before it gives its first event
            break
        for event, machine in walk(replace(query, words=words, limit=min(count, 200), media=True)):
            if event["has_snapshot"]:
                events.setdefault(event["id"], (event, machine))
            if len(events) >= count:
                break
    return list(events.values())


class SnapshotAsker:
    """Asks an engine about the snapshots of events. Callable from any thread.

    Args:
        engine: which stays the caller's. All searches are one stream of it, which has little weight.
        snapshot: the path of the snapshot of an event; None if there is none.
    """

    def __init__(self, engine: Engine, snapshot: Callable[[str], Path | None]) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._at_once = 1 if engine.model.device == "cpu" else AT_ONCE
        engine.configure_stream(_STREAM, StreamSettings(_WEIGHT, newest=False))

    def match(self, text: str, events: Iterable[str]) -> Iterator[tuple[str, float | None]]:
        """Each event with how likely its snapshot shows a text, in order; None where that cannot be read.

        Raises:
            ConfigError: if the model knows no name in the text.
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
        """A question with yes or no for an answer; or for a model that detects only, the names in the text."""
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
        raise ConfigError(f"{self._engine.model.name} knows no name in '{text}'; a model that talks does: {reason}")


def _likelihood(result: Result) -> float:
    if result.texts:
        text = result.texts[0]
        return (text.probabilities or {}).get(_YES, 1.0 if text.text == _YES else 0.0)
    return max((box.score for box in result.detections.boxes), default=0.0)


def _read(path: Path | None) -> NDArray[np.uint8] | None:
    image = None if path is None or not path.is_file() else cv2.imread(str(path))  # which warns of what is not there
    return None if image is None else np.ascontiguousarray(image[..., ::-1].astype(np.uint8))
