"""Searches the stored events of a run with workers. Each worker scores only the snapshots on its own machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from saccade.pipeline.control.stores import OWN, MachineStores
from saccade.pipeline.errors import StreamError
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.search import AT_ONCE, REQUESTED, Place, Progress, Searched, search

AWAY_S = 20.0  # wait for a machine without a worker; a dead worker is back after some seconds
_TRIES = 3  # maximum attempts, because the snapshots may crash the workers
_PAUSE_S = 0.2

MatchAt = Callable[[str, str, Sequence[str]], list[float | None] | None]
"""Scores snapshots on a machine. Returns None if no worker of the machine is available. Raises StreamError if the
worker dies, and ConfigError or EngineError if its model does not support the search."""


def search_workers(
    store: EventStore | MachineStores,
    match_at: MatchAt,
    workers: int,
    text: str,
    query: EventQuery,
    progress: Progress,
) -> Searched:
    """Search the stored events of all machines by a text.

    Args:
        store: lists the events.
        match_at: scores snapshots on workers.
        workers: maximum number of concurrent requests to workers.
        text: text to search for.
        query: filters for events.
        progress: progress callback (snapshots scored, total snapshots). If it raises an exception,
            the search stops.

    Raises:
        ConfigError, EngineError: if the text is empty, or the model does not support search.
    """
    away: set[str] = set()

    def walk(wanted: EventQuery) -> Iterator[tuple[dict[str, Any], str]]:
        if isinstance(store, MachineStores):
            return ((record, machine) for record, _, machine in store.walk_machines(wanted))
        return ((record, "") for record, _ in store.walk(wanted))

    def match(text: str, places: Sequence[Place]) -> Iterator[tuple[str, float | None]]:
        return _match(match_at, workers, text, places, away, progress)

    found = search(walk, match, text, query, candidates=REQUESTED)
    return Searched(found, sorted({*away, *store.away}))


def _match(
    match_at: MatchAt, workers: int, text: str, places: Sequence[Place], away: set[str], progress: Progress
) -> Iterator[tuple[str, float | None]]:
    machines: dict[str, list[str]] = {}
    for place in places:
        machines.setdefault(place.machine, []).append(place.event)
    gone, done = threading.Event(), 0
    pool = ThreadPoolExecutor(max(1, workers), "saccade search")
    try:
        asked = {
            pool.submit(_ask, partial(match_at, machine, text, piece), gone): (machine, piece)
            for machine, events in machines.items()
            for first in range(0, len(events), AT_ONCE)
            if (piece := events[first : first + AT_ONCE])
        }
        while asked:
            answered, _ = wait(asked, 0.1, FIRST_COMPLETED)
            for answer in answered:
                machine, piece = asked.pop(answer)
                found = answer.result()
                if found is None:
                    away.add(machine or OWN)
                done += len(piece)
                yield from zip(piece, found or [None] * len(piece), strict=True)
            progress(done, len(places))
    finally:
        gone.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(match: Callable[[], list[float | None] | None], gone: threading.Event) -> list[float | None] | None:
    """Call a worker that scores snapshots, with retries.

    Return the match probabilities, or None if no worker responds.
    """
    tries, until = 0, time.monotonic() + AWAY_S
    while not gone.is_set() and tries < _TRIES and time.monotonic() < until:
        try:
            if (found := match()) is not None:
                return found
        except StreamError:  # the worker has died
            tries += 1
            until = time.monotonic() + AWAY_S
        gone.wait(_PAUSE_S)
    return None
