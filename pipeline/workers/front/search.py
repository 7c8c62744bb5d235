"""Searches the events of a run with workers: candidates come from all stores, workers are asked about their snapshots.

A snapshot is asked about by a worker of the machine that has it, a few at a time; so frames and snapshots stay where
they are. What a worker was asked that ends meanwhile, another of the machine is asked, or the one that takes its place.
Knows addresses; no engine.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.search import AT_ONCE, REQUESTED, Place, Progress, Searched, search
from saccade.pipeline.workers.auth import secret_headers
from saccade.pipeline.workers.front.merged_events import OWN
from saccade.pipeline.workers.machines.stores import DIRECT, MachineStores
from saccade.pipeline.workers.states import WorkerSeat

_ANSWER_S = 120.0  # for a worker to answer
_POLL_S = 0.1
_AWAY_S = 20.0  # that a machine without a worker is waited for: one that ends is back after some seconds
_ENDED = 503  # what a worker answers whose engine has ended, and at once each time
_TRIES = 3  # by as many workers: the snapshots may be what ends them

Answer = Future[list[float | None]]


@dataclass(slots=True)
class _Piece:
    """Snapshots of one machine, about which a worker is asked at a time."""

    machine: str
    events: list[str]
    tries: int = 0  # in vain, by workers that took them


class WorkersSearch:
    """Searches when it is called, as `SearchEvents`. Callable from any thread.

    Args:
        stores: list events.
        seats: returns the workers as they are now.
        secret: that they know the front by.
        away_s: how long a machine without a worker is waited for.
    """

    def __init__(
        self, stores: MachineStores, seats: Callable[[], Sequence[WorkerSeat]], secret: str, away_s: float = _AWAY_S
    ) -> None:
        self._stores, self._seats, self._secret = stores, seats, secret
        self._away_s = away_s

    def __call__(self, text: str, query: EventQuery, progress: Progress) -> Searched:
        """Search. While workers are waited for `progress` is called again and again: by raising it ends the search.

        Raises:
            ConfigError: if there is nothing to search for, or the model cannot be asked that.
        """
        away: set[str] = set()
        found = search(
            lambda wanted: self._stores.walk(wanted, away),
            lambda text, places: self._match(text, places, away, progress),
            text,
            query,
            candidates=REQUESTED,
        )
        return Searched(found, sorted(machine or OWN for machine in away))

    def _match(
        self, text: str, places: Sequence[Place], away: set[str], progress: Progress
    ) -> Iterator[tuple[str, float | None]]:
        """As `Match`; machines whose workers do not answer are added to `away`."""
        waiting = deque(_pieces(places))
        asked: dict[Answer, tuple[str, _Piece]] = {}
        dead: set[str] = set()  # addresses, which the next worker in a place does not have
        alone: dict[str, float] = {}
        done = 0
        while waiting or asked:
            seats = [seat for seat in self._seats() if seat.ready and seat.url not in dead]
            self._ask_free(text, seats, waiting, asked)
            answered, _ = wait(asked, _POLL_S, FIRST_COMPLETED)
            over: list[tuple[str, float | None]] = []
            for answer in answered:
                url, piece = asked.pop(answer)
                try:
                    over += zip(piece.events, answer.result(), strict=True)
                except (OSError, http.client.HTTPException) as error:
                    if not isinstance(error, urllib.error.HTTPError) or error.code == _ENDED:
                        dead.add(url)
                    piece.tries += not isinstance(getattr(error, "reason", None), ConnectionRefusedError)
                    waiting.appendleft(piece)
            _note_alone(alone, {piece.machine for piece in waiting}, {seat.machine for seat in seats})
            for piece in [one for one in waiting if self._is_given_up(one, alone)]:
                waiting.remove(piece)
                away.add(piece.machine)
                over += [(event, None) for event in piece.events]
            yield from over
            done += len(over)
            progress(done, len(places))
            if not asked and waiting:
                time.sleep(_POLL_S)

    def _ask_free(
        self, text: str, seats: Sequence[WorkerSeat], waiting: deque[_Piece], asked: dict[Answer, tuple[str, _Piece]]
    ) -> None:
        """Ask every worker that is not asked yet about the next snapshots of its machine."""
        busy = {url for url, _ in asked.values()}
        for seat in seats:
            url = seat.url
            if url is None or url in busy:
                continue
            piece = next((one for one in waiting if one.machine == seat.machine), None)
            if piece is not None:
                waiting.remove(piece)
                asked[_begun(self._ask, url, text, piece.events)] = url, piece

    def _is_given_up(self, piece: _Piece, alone: dict[str, float]) -> bool:
        since = alone.get(piece.machine)
        return piece.tries >= _TRIES or (since is not None and time.monotonic() > since + self._away_s)

    def _ask(self, url: str, text: str, events: list[str]) -> list[float | None]:
        """The answers of a worker.

        Raises:
            ConfigError: if the model cannot be asked that.
            OSError, HTTPException: if the worker does not answer.
        """
        headers = {**secret_headers(self._secret), "Content-Type": "application/json"}
        body = json.dumps({"text": text, "events": events}).encode()
        try:
            with DIRECT.open(
                urllib.request.Request(f"{url}/snapshots/match", body, headers), timeout=_ANSWER_S
            ) as answer:
                match: list[float | None] = json.load(answer)["match"]
                return match
        except urllib.error.HTTPError as error:
            if error.code != 422:
                raise
            raise ConfigError(json.load(error)["error"]) from None


def _note_alone(alone: dict[str, float], machines: set[str], there: set[str]) -> None:
    """Note since when machines have no worker, of which those `there` have some."""
    for machine in machines - there:
        alone.setdefault(machine, time.monotonic())
    for machine in there:
        alone.pop(machine, None)


def _pieces(places: Sequence[Place]) -> Iterator[_Piece]:
    """The places as pieces, in their order on each machine, of the machines in turn."""
    machines: dict[str, list[str]] = defaultdict(list)
    for place in places:
        machines[place.machine].append(place.event)
    for first in range(0, len(places), AT_ONCE):
        for machine, events in machines.items():
            if piece := events[first : first + AT_ONCE]:
                yield _Piece(machine, piece)


def _begun(call: Callable[..., list[float | None]], *arguments: Any) -> Answer:
    """Call something in a thread of its own, which nothing waits for when the process ends."""
    answer: Answer = Future()

    def work() -> None:
        try:
            answer.set_result(call(*arguments))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="saccade search", daemon=True).start()
    return answer
