"""The stores of events on the machines of a Ray cluster, with one face: each is written on its own machine.

The controller's machine has an `EventStore`; on every other one an actor writes one for all workers there, outlives
them, and is asked by Ray's calls. Records for a machine that is away wait, up to 10,000 for each.
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

log = logging.getLogger(__name__)

STORES = "store-"
"""What the names of the actors begin with; the node's id follows."""
FOLDER = "SACCADE_STORE"
"""The variable of the environment of `ray start` that names another folder on its machine."""
OWN = "controller"
"""What the controller's own machine is called, where its store fails."""
MAX_WAITING = 10_000
RETRY_S = 2.0
_BATCH = 100
_ASK_S = 10.0
_BEGIN_S = 60.0  # for the actor to be scheduled and its module loaded, on a busy machine
_CLOSE_S = 5.0
_ASKED_AT_ONCE = 16

Record = Mapping[str, Any]
Stored = tuple[dict[str, Any], float]
T = TypeVar("T")


class StoreActor:
    """What runs in the actor of a machine.

    Args:
        folder: that a relative path of the store begins in; left as it is where this machine has no such folder.
        store: path of the store's folder.
        keep_s, max_bytes: as in `EventStore`.
    """

    def __init__(self, folder: str, store: str, keep_s: float | None, max_bytes: int | None) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._store: EventStore | None = None
        self._problem = ""
        try:  # what has ended meanwhile, the controller says
            self._store = EventStore(Path(store).absolute(), keep_s=keep_s, max_bytes=max_bytes, keep_open=True)
        except StoreError as error:
            self._problem = one_line(str(error))

    def media(self) -> tuple[str | None, str]:
        """The folder of clips and snapshots; None, and why, if this machine has no store of its own."""
        return (None, self._problem) if self._store is None else (str(self._store.media_folder), "")

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the store returns."""
        if self._store is None:
            raise StoreError(self._problem)
        return getattr(self._store, method)(*arguments)

    def write(self, records: Sequence[Record]) -> None:
        """Store records; they are on disk when this returns, but for those of a full disk."""
        if self._store is None:
            raise StoreError(self._problem)
        for record in records:
            try:
                self._store.write(record)
            except (KeyError, TypeError, ValueError) as error:  # one that is none must not keep the others waiting
                log.warning("a record could not be stored: %s", error)
        with contextlib.suppress(StoreError):  # its disk is full: it keeps them until they can be written
            self._store.flush()

    def close(self) -> None:
        """End."""
        if self._store is not None:
            self._store.close()


def store_here(settings: WorkerSettings, host: str) -> tuple[str, str, str | None]:
    """Where a worker on this machine keeps events: the machine's name, Ray's id of it, and the folder of media.

    An actor is made for that if there is none. The name and the id are "" where the controller keeps them: on its own
    machine, and where the folder cannot be used here, such as one that the machines share.
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
        log.warning("events are stored on the controller's machine: %s", problem)
        return "", "", settings.media
    return f"{host}-{node[:6]}", node, media


def end_stores() -> None:
    """End the stores of all machines."""
    names: Any = ray.util.list_named_actors()  # of our namespace
    for name in names:
        if name.startswith(STORES):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                actor = ray.get_actor(name)
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(actor.close.remote(), timeout=_ASK_S)
                ray.kill(actor)


class RemoteStore:
    """The store of another machine. It is asked first for what goes on there; then it is given records, in order.

    Args:
        machine: its name.
        node: Ray's id of it.
        load: is given what goes on there, once, with the machine's name.
    """

    def __init__(self, machine: str, node: str, load: Callable[[Sequence[Record], str], None]) -> None:
        self.away = False
        self._machine, self._node, self._load = machine, node, load
        self._changed = threading.Condition()  # over what follows
        self._waiting: deque[Record] = deque()
        self._lost = 0
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._work, name="saccade remote store", daemon=True)
        self._thread.start()

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the store returns; raises StoreError if it does not answer."""
        return self._ask("call", method, *arguments)

    def write(self, record: Record) -> None:
        """Have a record stored; returns at once. Where too many wait, the oldest is lost."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(record)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand over what waits, for some seconds at most."""
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
            raise StoreError(f"the store of {self._machine} does not answer") from error
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
                    log.warning("events of %s wait until its store answers: %s", self._machine, error)
                told = True
                with self._changed:
                    if self._is_over():
                        return
                    self._waiting.extendleft(reversed(batch))
                    self._changed.wait_for(lambda: self._closing_at is not None, RETRY_S)
            else:
                if told:
                    log.warning("events of %s are stored again; changes lost: %d", self._machine, self._lost)
                    told, self._lost = False, 0

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


class MachineStores:
    """The stores of all machines, with the reading methods of an `EventStore`. Callable from any thread.

    Args:
        local: of the controller's own machine; it stays the caller's.
        load: as in `RemoteStore`.
        address_of: where files of a machine are served; None while nobody there does.
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
        """The names of the machines whose store does not answer."""
        return sorted(machine for machine, store in self._stores() if store is not None and store.away)

    def meet(self, machine: str, node: str) -> None:
        """A machine stores its events itself; returns at once."""
        with self._lock:
            if machine not in self._remote:
                self._remote[machine] = RemoteStore(machine, node, self._load)

    def write(self, record: Record, machine: str = "") -> None:
        """Store a record on its machine."""
        with self._lock:
            remote = self._remote.get(machine)
        if remote is not None:
            remote.write(record)
        else:
            self._local.write(record)

    def page(self, query: EventQuery, more: int = 0) -> list[Stored]:
        """As `EventReader.page`: the newest of all machines."""
        pages = self._ask_all("page", query, more)
        found = sorted(chain(*pages.values()), key=lambda one: (one[1], one[0]["id"]), reverse=True)
        return found[: query.limit + more]

    def rules(self, stream: str | None = None) -> list[str]:
        """As `EventReader.rules`."""
        return sorted(set(chain(*self._ask_all("rules", stream).values())))

    def counts(self, stream: str, since: float) -> list[dict[str, Any]]:
        """As `EventReader.counts`."""
        minutes: list[dict[str, Any]] = list(chain(*self._ask_all("counts", stream, since).values()))
        return sorted(minutes, key=lambda minute: minute["start"])

    def get(self, event: str) -> dict[str, Any] | None:
        """As `EventReader.get`."""
        found: list[dict[str, Any] | None] = list(self._ask_all("get", event).values())
        return next((record for record in found if record is not None), None)

    def delete(self, event: str) -> bool:
        """As `EventStore.delete`."""
        return any(self._ask_all("delete", event).values())

    def media(self, event: str, kind: str) -> Path | Address | None:
        """As `EventReader.media`; of another machine, who serves it there, at `/media/{event}/{kind}`."""
        for machine, path in self._ask_all("media", event, kind).items():
            if path is not None and machine:
                return self._address_of(machine)
            if path is not None:
                return Path(path)
        return None

    def walk_machines(self, query: EventQuery) -> Iterator[tuple[dict[str, Any], float, str]]:
        """As `EventReader.walk`, with the machine of each; a machine that does not answer is left out."""

        def of(machine: str, store: RemoteStore | None) -> Iterator[tuple[dict[str, Any], float, str]]:
            try:
                pages = self._local.walk(query) if store is None else walk_pages(_page_of(store), query)
                for record, stored_at in pages:
                    yield record, stored_at, machine
            except StoreError as error:
                log.debug("%s: %s", machine or OWN, error)

        walks = [of(machine, store) for machine, store in self._stores()]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:  # one that does not answer keeps no other waiting
            first = list(pool.map(lambda one: list(islice(one, 1)), walks))
        begun = [chain(one, rest) for one, rest in zip(first, walks, strict=True)]
        return heapq.merge(*begun, key=lambda one: one[1], reverse=True)

    def close(self) -> None:
        """Hand over what waits, for some seconds at most, and end."""
        for _, store in self._stores():
            if store is not None:
                store.close()

    def _stores(self) -> list[tuple[str, RemoteStore | None]]:
        with self._lock:
            return [("", None), *self._remote.items()]

    def _ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """What the stores that answer return, by machine; raises StoreError if the controller's own fails."""

        def ask(one: tuple[str, RemoteStore | None]) -> tuple[str, Any] | None:
            machine, store = one
            if store is None:
                return machine, getattr(self._local, method)(*arguments)
            try:
                return machine, store.ask(method, *arguments)
            except StoreError:
                return None  # it is listed as away

        stores = self._stores()
        if len(stores) == 1:
            return dict(filter(None, map(ask, stores)))
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            return dict(filter(None, pool.map(ask, stores)))


def _page_of(store: RemoteStore) -> Callable[[EventQuery], list[Stored]]:
    return lambda query: list(store.ask("page", query, 1))
