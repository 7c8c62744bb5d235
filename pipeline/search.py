"""Finds stored events by asking a model: SQL chooses candidates, the model is asked about their snapshots.

A model that answers questions says for each how likely the text is true of it; one that detects only, such as nano,
finds the names in it. Knows stores and engines; no terminals, no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.engine.errors import UnknownClassError
from saccade.engine.results import Result
from saccade.engine.scheduling.task import Task
from saccade.engine.tasks import Detect, Query
from saccade.pipeline.core.errors import ConfigError
from saccade.pipeline.events.store_reader import EventQuery, EventReader

if TYPE_CHECKING:
    from saccade.engine import Engine

CANDIDATES = 200
"""Events that the model is asked about in one search."""

_AT_ONCE = 4  # images given to the engine at a time
_LONG_S = 120.0  # that the engine may take for one
_YES = "yes"
_LEAST = 0.05  # of a detection that counts


@dataclass(slots=True, frozen=True)
class Found:
    """An event, and how likely it shows what was searched for, 0 to 1."""

    event: dict[str, Any]
    p_yes: float

    def to_json(self) -> dict[str, Any]:
        """The record of the event, with `match`."""
        return {**self.event, "match": round(self.p_yes, 3)}


def search_events(
    store: EventReader,
    engine: Engine,
    text: str,
    query: EventQuery | None = None,
    *,
    candidates: int = CANDIDATES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Found]:
    """Ask a model which stored events show something.

    Args:
        store: of the events.
        engine: is asked.
        text: what is searched for, such as a red truck.
        query: which events count; its `limit` is how many are returned.
        candidates: how many the model is asked about: first those with the words in labels, answers or attributes, then
            the newest others.
        progress: called with (done, all).

    Returns:
        The likeliest first; those whose snapshot is gone are left out.

    Raises:
        ConfigError: if there is nothing to search for, or the model knows no name in it.
        EngineError: if the model fails.
    """
    wanted = query or EventQuery()
    if not text.strip():
        raise ConfigError("nothing to search for: give a text such as 'red truck'")
    tasks = _tasks_for(engine, text)
    chosen = _candidates(store, text, wanted, candidates)
    found = []
    for number, (event, p_yes) in enumerate(_ask(store, engine, tasks, chosen), 1):
        if p_yes is not None:
            found.append(Found(event, p_yes))
        if progress is not None:
            progress(number, len(chosen))
    found.sort(key=lambda one: -one.p_yes)  # which keeps the order of equals: events with the words first
    return found[: wanted.limit]


def _candidates(store: EventReader, text: str, query: EventQuery, count: int) -> list[dict[str, Any]]:
    events: dict[str, dict[str, Any]] = {}
    for words in (f"{query.words} {text}", query.words):
        after = None
        while len(events) < count:
            page = store.search(replace(query, words=words, limit=min(count, 200), after=after))
            events |= {one["id"]: one for one in page if one["has_snapshot"] and one["id"] not in events}
            if len(page) < min(count, 200):
                break
            after = page[-1]["id"]
    return list(events.values())[:count]


def _tasks_for(engine: Engine, text: str) -> list[Task]:
    """A question with yes or no for an answer; or for a model that detects only, the names in the text."""
    if "query" in engine.model.skills:
        return [Query(f"Does this image show {text.strip()}?", choices=(_YES, "no"))]
    tasks: dict[Task, None] = {}
    for name in (text.strip(), *text.split()):
        try:
            tasks |= dict.fromkeys(engine.expand(Detect(name, conf=_LEAST)))
        except UnknownClassError as error:
            reason = error
        if tasks:
            return list(tasks)
    raise ConfigError(f"{engine.model.name} knows no name in '{text}'; a model that talks does: {reason}")


def _ask(
    store: EventReader, engine: Engine, tasks: Sequence[Task], events: Iterable[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], float | None]]:
    """Each event with its likelihood, in order; None where its snapshot cannot be read."""
    waiting: deque[tuple[dict[str, Any], Future[Result] | None]] = deque()

    def taken() -> tuple[dict[str, Any], float | None]:
        event, future = waiting.popleft()
        return event, None if future is None else _likelihood(future.result(_LONG_S))

    try:
        for event in events:
            image = _snapshot(store, event["id"])
            waiting.append((event, None if image is None else engine.submit(image, tasks)))
            if len(waiting) >= _AT_ONCE:
                yield taken()
        while waiting:
            yield taken()
    finally:
        for _, future in waiting:
            if future is not None:
                future.cancel()


def _likelihood(result: Result) -> float:
    if result.texts:
        text = result.texts[0]
        return (text.probabilities or {}).get(_YES, 1.0 if text.text == _YES else 0.0)
    return max((box.score for box in result.detections.boxes), default=0.0)


def _snapshot(store: EventReader, event: str) -> NDArray[np.uint8] | None:
    path = store.media(event, "snapshot")
    image = None if path is None else cv2.imread(str(path))
    return None if image is None else np.ascontiguousarray(image[..., ::-1].astype(np.uint8))
