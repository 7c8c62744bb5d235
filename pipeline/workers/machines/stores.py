"""Where the front has events stored: each on the machine that made it, its own or another.

Records for another machine wait while that is away, up to 10,000 for each. Knows addresses and records; not who has
made them.
"""

from __future__ import annotations

import heapq
import http.client
import json
import logging
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any
from urllib.parse import urlencode

from saccade.pipeline.server.api.events_query import filters_of

from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery, walk_pages
from saccade.pipeline.workers.auth import secret_headers
from saccade.pipeline.workers.machines.store_server import StoreServer
from saccade.pipeline.workers.open_events import Record

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
RETRY_S = 2.0
_BATCH = 100
_ASK_S = 10.0
_CLOSE_S = 5.0
_ASKED_AT_ONCE = 16
_NO_ANSWER = (OSError, ValueError, KeyError, http.client.HTTPException)
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""For workers and their machines: a proxy is for other networks."""

Load = Callable[[Sequence[Record], str], None]
"""Takes the records of events that went on when a store was found, and the name of its machine."""


class RemoteStore:
    """The store of another machine. It is asked first for what goes on there; then it is given records, in order.

    Args:
        machine: its name.
        url: of its store's server; may change.
        secret: that it knows the front by.
        load: is given what goes on there, once.
    """

    def __init__(self, machine: str, url: str, secret: str, load: Load) -> None:
        self.url = url
        self._machine, self._secret, self._load = machine, secret, load
        self._changed = threading.Condition()  # over what follows
        self._waiting: deque[Record] = deque()
        self._lost = 0
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._work, name="saccade remote store", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Have a record stored; returns at once. Where too many wait, the oldest is lost."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(record)
            self._changed.notify_all()

    def walk(self, query: EventQuery) -> Iterator[tuple[dict[str, Any], float]]:
        """As `EventReader.walk`.

        Raises:
            OSError, ValueError, HTTPException: if it does not answer.
        """

        def page(query: EventQuery) -> list[tuple[dict[str, Any], float]]:
            filters = filters_of(query) | ({"media": "1"} if query.media else {})
            found: list[tuple[dict[str, Any], float]] = self._ask(f"/stored?{urlencode(filters)}")["events"]
            return found

        return walk_pages(page, query)

    def close(self) -> None:
        """Hand over what waits, for some seconds at most."""
        with self._changed:
            self._closing_at = time.monotonic() + _CLOSE_S
            self._changed.notify_all()
        self._thread.join(_CLOSE_S + _ASK_S)

    def _work(self) -> None:
        loaded = away = False
        while (batch := self._next(loaded)) is not None:
            try:
                if not loaded:
                    self._load(self._ask("/going-on")["events"], self._machine)
                    loaded = True
                if batch:
                    self._ask("/records", {"records": batch})
            except _NO_ANSWER as error:
                if not away:
                    log.warning("events of %s wait until its store answers: %s", self._machine, error)
                away = True
                with self._changed:
                    if self._is_over():
                        return
                    self._waiting.extendleft(reversed(batch))
                    self._changed.wait_for(lambda: self._closing_at is not None, RETRY_S)
            else:
                if away:
                    log.warning("events of %s are stored again; changes lost: %d", self._machine, self._lost)
                    away, self._lost = False, 0

    def _next(self, loaded: bool) -> list[Record] | None:
        """The next records to hand over, none at the first time; None if there will be no more."""
        with self._changed:
            if not loaded:
                return None if self._is_over() else []
            self._changed.wait_for(lambda: self._waiting or self._closing_at is not None)
            if not self._waiting or self._is_over():
                return None
            return [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]

    def _is_over(self) -> bool:
        return self._closing_at is not None and (not self._waiting or time.monotonic() > self._closing_at)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {**secret_headers(self._secret), "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with DIRECT.open(request, timeout=_ASK_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None


class MachineStores:
    """The stores of all machines. Every method is callable from any thread.

    Args:
        local: of the front's own machine; it stays the caller's. None if events are not stored there.
        secret: that other machines know the front by.
        load: as in `RemoteStore`.
    """

    def __init__(self, local: EventStore | None, secret: str, load: Load) -> None:
        self._local, self._secret, self._load = local, secret, load
        self._lock = threading.Lock()
        self._remote: dict[str, RemoteStore] = {}
        self._server: StoreServer | None = None

    def serve_local(self) -> None:
        """Serve the front's own store as others are, on this machine alone, so that all are read in one way."""
        if self._local is not None and self._server is None:
            self._server = StoreServer(self._local, self._secret)

    def meet(self, machine: str, url: str) -> None:
        """A machine stores its events itself, at an address; returns at once."""
        with self._lock:
            known = self._remote.get(machine)
            if known is None:
                self._remote[machine] = RemoteStore(machine, url, self._secret, self._load)
            else:
                known.url = url

    def urls(self) -> dict[str, str]:
        """The addresses of all stores by their machines' names, "" the front's own."""
        own = {} if self._server is None else {"": self._server.url}
        return own | self.remote_urls()

    def remote_urls(self) -> dict[str, str]:
        """The addresses of the stores of other machines, by the machines' names."""
        with self._lock:
            return {machine: remote.url for machine, remote in self._remote.items()}

    def write(self, record: Record, machine: str) -> None:
        """Store a record on its machine."""
        with self._lock:
            remote = self._remote.get(machine)
        if remote is not None:
            remote.write(record)
        elif self._local is not None:
            self._local.write(record)

    def walk(self, query: EventQuery, away: set[str]) -> Iterator[tuple[dict[str, Any], str]]:
        """The records of all events of a query, newest first, whatever its limit.

        Args:
            query: which ones; so many as its limit says are asked for at a time.
            away: takes the names of machines that do not answer.

        Returns:
            Each record with the name of its machine, "" for the front's own.
        """
        with self._lock:
            stores: list[tuple[str, EventStore | RemoteStore]] = list(self._remote.items())
        if self._local is not None:
            stores.append(("", self._local))

        def of(machine: str, store: EventStore | RemoteStore) -> Iterator[tuple[float, str, dict[str, Any]]]:
            try:
                for record, stored_at in store.walk(query):
                    yield stored_at, machine, record
            except _NO_ANSWER:
                away.add(machine)

        walks = [of(machine, store) for machine, store in stores]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:  # one that does not answer keeps no other waiting
            first = list(pool.map(lambda one: list(islice(one, 1)), walks))
        begun = [chain(one, rest) for one, rest in zip(first, walks, strict=True)]
        for _, machine, record in heapq.merge(*begun, key=lambda one: one[0], reverse=True):
            yield record, machine

    def close(self) -> None:
        """Hand over what waits, for some seconds at most, and end."""
        with self._lock:
            remote = list(self._remote.values())
        for one in remote:
            one.close()
        if self._server is not None:
            self._server.close()
