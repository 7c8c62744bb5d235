"""The event stores of all machines of a Ray cluster, behind one interface. Each machine stores its own events.

On the controller's machine, the controller process writes the store. On every other machine, a Ray actor writes it.
While a machine is unreachable, up to 10,000 records for it are queued.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from saccade.pipeline.control.runner import Address
from saccade.pipeline.control.worker_calls import WorkerSettings
from saccade.pipeline.errors import one_line
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery, StoreError, walk_pages
from saccade.pipeline.events.verdicts import Verdict

log = logging.getLogger(__name__)

STORES = "store-"
"""Name prefix of the store actors, followed by the node's ID."""
FOLDER = "SACCADE_STORE"
"""Environment variable of `ray start` that names another store folder on its machine."""
OWN = "controller"
"""Name of the controller's machine in errors of its store."""
MAX_WAITING = 10_000
RETRY_S = 2.0
_BATCH = 100
_ASK_S = 10.0
_BEGIN_S = 60.0  # time limit for scheduling the actor and loading its module on a busy machine
_CLOSE_S = 5.0
_ASKED_AT_ONCE = 16

Record = Mapping[str, Any]
Stored = tuple[dict[str, Any], float]
T = TypeVar("T")


class StoreActor:
    """The Ray actor that stores the events of one machine.

    Args:
        folder: base folder of a relative store path.
        store: path of the event store's folder.
        keep_s, max_bytes: see `EventStore`.
    """

    def __init__(self, folder: str, store: str, keep_s: float | None, max_bytes: int | None) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._store: EventStore | None = None
        self._problem = ""
        try:  # keep_open, because the controller decides which events have ended
            self._store = EventStore(Path(store).absolute(), keep_s=keep_s, max_bytes=max_bytes, keep_open=True)
        except StoreError as error:
            self._problem = one_line(str(error))

    def media(self) -> tuple[str | None, str]:
        """Return (media folder, error). Without an error, `error` is empty. After an error, the folder is None."""
        return (None, self._problem) if self._store is None else (str(self._store.media_folder), "")

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the event store and return its result.

        Raises:
            StoreError: if the store could not be opened.
        """
        if self._store is None:
            raise StoreError(self._problem)
        return getattr(self._store, method)(*arguments)

    def write(self, records: Sequence[Record]) -> None:
        """Store event records. When the call returns, they are on disk, unless the disk is full.

        Raises:
            StoreError: if the store could not be opened.
        """
        if self._store is None:
            raise StoreError(self._problem)
        for record in records:
            try:
                self._store.write(record)
            except (KeyError, TypeError, ValueError) as error:  # an invalid record must not block the others
                log.warning("an invalid event record was dropped: %s", error)
        with contextlib.suppress(StoreError):  # the disk is full; the store keeps the records until they can be written
            self._store.flush()

    def close(self) -> None:
        """Close the event store."""
        if self._store is not None:
            self._store.close()


def store_here(settings: WorkerSettings, host: str) -> tuple[str, str, str | None]:
    """Start the event store of the worker's machine, if needed. Return machine name, Ray node ID and media folder.

    Machine name and node ID are empty if the controller stores the events of the worker.
    """
    node = ray.get_runtime_context().get_node_id()
    if settings.store is None or node == settings.node:
        return "", "", settings.media
    made = ray.remote(StoreActor).options(
        name=f"{STORES}{node}",
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    folder = os.environ.get(FOLDER) or settings.store
    actor: Any = made.remote(settings.folder, folder, settings.keep_s, settings.max_bytes)
    found: Any = ray.get(actor.media.remote(), timeout=_BEGIN_S)
    media, problem = found
    if media is None:
        log.warning("cannot store events on this machine, so the controller's machine stores them: %s", problem)
        return "", "", settings.media
    return f"{host}-{node[:6]}", node, media


def end_stores() -> None:
    """Stop the event stores of all machines."""
    names: Any = ray.util.list_named_actors()  # in our namespace
    for name in names:
        if name.startswith(STORES):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                actor = ray.get_actor(name)
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(actor.close.remote(), timeout=_ASK_S)
                ray.kill(actor)


class RemoteStore:
    """Sends event records to the event store of another machine, oldest first.

    Args:
        machine: name of the machine.
        node: Ray's node ID of the machine.
        load: called once with (open events of the store, machine name), before the first record is sent.
    """

    def __init__(self, machine: str, node: str, load: Callable[[Sequence[Record], str], None]) -> None:
        self.away = False
        self._machine, self._node, self._load = machine, node, load
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting: deque[Record] = deque()
        self._lost = 0
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._work, name="saccade remote store", daemon=True)
        self._thread.start()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of another machine's event store and return its result.

        Raises:
            StoreError: if the store does not respond.
        """
        return self._ask("call", method, *arguments)

    def write(self, record: Record) -> None:
        """Queue an event record for storage, without waiting. If the queue is full, drop its oldest record."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(record)
            self._changed.notify_all()

    def close(self) -> None:
        """Send the queued records and stop. Records that are not sent within `_CLOSE_S` seconds are dropped."""
        with self._changed:
            self._closing_at = time.monotonic() + _CLOSE_S
            self._changed.notify_all()
        self._thread.join(_CLOSE_S + _ASK_S)

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            actor = ray.get_actor(f"{STORES}{self._node}")
            found: Any = ray.get(getattr(actor, method).remote(*arguments), timeout=_ASK_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StoreError | ValueError):
                raise error.cause from None
            raise
        except (ValueError, ray.exceptions.RayError) as error:
            self.away = True
            raise StoreError(f"the event store of {self._machine} does not respond") from error
        self.away = False
        return found

    def _work(self) -> None:
        loaded = told = False
        while (batch := self._next(loaded)) is not None:
            try:
                if not loaded:
                    self._load(self.ask("going_on"), self._machine)
                    loaded = True
                if batch:
                    self._ask("write", batch)
            except StoreError as error:
                if not told:
                    log.warning(
                        "cannot write to the event store of machine %s; its events stay in memory: %s",
                        self._machine,
                        error,
                    )
                told = True
                with self._changed:
                    if self._is_over():
                        return
                    self._waiting.extendleft(reversed(batch))
                    self._changed.wait_for(lambda: self._closing_at is not None, RETRY_S)
            else:
                if told:
                    log.warning(
                        "the event store of machine %s responds again; dropped event changes: %d",
                        self._machine,
                        self._lost,
                    )
                    told, self._lost = False, 0

    def _next(self, loaded: bool) -> list[Record] | None:
        """Wait for queued records and return some of them. Return None when the sender thread should end.

        Args:
            loaded: if False, return an empty list without waiting.
        """
        with self._changed:
            if not loaded:
                return None if self._is_over() else []
            self._changed.wait_for(lambda: self._waiting or self._closing_at is not None)
            if not self._waiting or self._is_over():
                return None
            return [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]

    def _is_over(self) -> bool:
        return self._closing_at is not None and (not self._waiting or time.monotonic() > self._closing_at)


class MachineStores:
    """The event stores of all machines, with the same read methods as `EventStore`. Thread-safe.

    False-alarm marks of all machines are stored on the controller's machine.

    Args:
        local: event store of the controller's machine. The caller closes it.
        load: called once per machine with (open events of the machine, machine name).
        address_of: returns the address of the server for a machine's files, or None if the machine is unreachable.
    """

    def __init__(
        self,
        local: EventStore,
        load: Callable[[Sequence[Record], str], None],
        address_of: Callable[[str], Address | None],
    ) -> None:
        self._local, self._load, self._address_of = local, load, address_of
        self._lock = threading.Lock()
        self._remote: dict[str, RemoteStore] = {}

    @property
    def away(self) -> list[str]:
        """The names of the machines whose event store cannot be reached."""
        return sorted(machine for machine, store in self._stores() if store is not None and store.away)

    def register(self, machine: str, node: str) -> None:
        """Register a machine that stores its own events. Return without waiting for the machine."""
        with self._lock:
            if machine not in self._remote:
                self._remote[machine] = RemoteStore(machine, node, self._load)

    def write(self, record: Record, machine: str = "") -> None:
        """Write an event record to the event store of a machine. An empty name stands for the controller's machine."""
        with self._lock:
            remote = self._remote.get(machine)
        if remote is not None:
            remote.write(record)
        else:
            self._local.write(record)

    def page(self, query: EventQuery, more: int = 0) -> list[Stored]:
        """Return the newest matching event records of all machines, with the times at which they were stored."""
        pages = self._ask_all("page", query, more)
        found = sorted(chain(*pages.values()), key=lambda one: (one[1], one[0]["id"]), reverse=True)
        return found[: query.limit + more]

    def rules(self, stream: str | None = None) -> list[str]:
        """Return the names of rules that have stored events on any machine."""
        return sorted(set(chain(*self._ask_all("rules", stream).values())))

    def counts(self, stream: str, since: float) -> list[dict[str, Any]]:
        """Return the stored object counts of a stream for each minute that starts at or after the Unix time `since`."""
        minutes: list[dict[str, Any]] = list(chain(*self._ask_all("counts", stream, since).values()))
        return sorted(minutes, key=lambda minute: minute["start"])

    def get(self, event: str) -> dict[str, Any] | None:
        """Return the record of a stored event. Return None if the event ID is unknown."""
        found: list[dict[str, Any] | None] = list(self._ask_all("get", event).values())
        return next((record for record in found if record is not None), None)

    def machine_of(self, event: str) -> str | None:
        """Return the name of the machine that stores an event. Return None if no reachable store has the event."""
        found = self._ask_all("get", event)
        return next((machine for machine, record in found.items() if record is not None), None)

    def delete(self, event: str) -> bool:
        """Delete an event and its media files. Return False if the event ID is unknown."""
        return any(self._ask_all("delete", event).values())

    def judge(self, event: str, *, false_alarm: bool) -> str | None:
        """Mark an event of any machine as a false alarm, or remove the mark; see `EventStore.judge`."""
        stream = self._local.judge(event, false_alarm=false_alarm)
        if stream is not None:
            return stream
        if not false_alarm:
            record = self.get(event)
            return None if record is None else str(record["stream"])
        found: list[Verdict] = list(filter(None, self._ask_all("verdict_on", event).values()))
        if not found:
            return None
        self._local.keep_verdict(found[0])
        return found[0].stream

    def verdicts(self, stream: str | None = None) -> list[Verdict]:
        """Return the events that users marked as false alarms, of one stream or of all streams, oldest first."""
        return self._local.verdicts(stream)

    def media(self, event: str, kind: str) -> Path | Address | None:
        """Return the path of an event's clip or snapshot. Return None if the file does not exist.

        If the file is on another machine, return the address of the server that serves it at `/media/{event}/{kind}`.
        """
        for machine, path in self._ask_all("media", event, kind).items():
            if path is not None and machine:
                return self._address_of(machine)
            if path is not None:
                return Path(path)
        return None

    def walk_machines(self, query: EventQuery) -> Iterator[tuple[dict[str, Any], float, str]]:
        """Yield all events that match a query, with their storage times and the names of their machines.

        Events of unreachable machines are missing.
        """

        def of(machine: str, store: RemoteStore | None) -> Iterator[tuple[dict[str, Any], float, str]]:
            try:
                pages = self._local.walk(query) if store is None else walk_pages(_page_of(store), query)
                for record, stored_at in pages:
                    yield record, stored_at, machine
            except StoreError as error:
                log.debug("%s: %s", machine or OWN, error)

        walks = [of(machine, store) for machine, store in self._stores()]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:  # an unreachable store does not block the others
            first = list(pool.map(lambda one: list(islice(one, 1)), walks))
        begun = [chain(one, rest) for one, rest in zip(first, walks, strict=True)]
        return heapq.merge(*begun, key=lambda one: one[1], reverse=True)

    def close(self) -> None:
        """Send the queued records to all machines and stop.

        Records that are not sent before the timeout are dropped.
        """
        for _, store in self._stores():
            if store is not None:
                store.close()

    def _stores(self) -> list[tuple[str, RemoteStore | None]]:
        with self._lock:
            return [("", None), *self._remote.items()]

    def _ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of all event stores. Return the results of reachable stores, by machine name."""

        def ask(one: tuple[str, RemoteStore | None]) -> tuple[str, Any] | None:
            machine, store = one
            if store is None:
                return machine, getattr(self._local, method)(*arguments)
            try:
                return machine, store.ask(method, *arguments)
            except StoreError:
                return None  # the store is listed as unreachable

        stores = self._stores()
        if len(stores) == 1:
            return dict(filter(None, map(ask, stores)))
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            return dict(filter(None, pool.map(ask, stores)))


def _page_of(store: RemoteStore) -> Callable[[EventQuery], list[Stored]]:
    return lambda query: list(store.ask("page", query, 1))
