"""A worker as an actor of a Ray cluster: placed, started again and counted by Ray; frames never leave its process.

The actor holds a `Relay`, which has the same process as a worker of this machine. Commands and messages are calls of
the actor; neither they nor results, which are small, go through the object store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from saccade.pipeline.errors import one_line
from saccade.pipeline.workers.cluster.relay import Relay
from saccade.pipeline.workers.cluster.store_actor import store_here
from saccade.pipeline.workers.process.memory import available_bytes, room_for, rss_bytes
from saccade.pipeline.workers.protocol import Message, WorkerState
from saccade.pipeline.workers.states import number_of

log = logging.getLogger(__name__)

NAMESPACE = "saccade"
POLL_S = 1.0
SILENT_S = 3.0
"""Without an answer of its actor, beyond `POLL_S`, after which a worker is taken to have ended: with 2 s of grace
(`placement`) and the time to a key frame, its streams are back within 10 s. Ray itself takes longer to notice."""
_LOADING_S = 30.0  # likewise until the worker is ready: on a busy machine others that load torch keep its actor waiting
START_S = 180.0  # for an actor to be scheduled and its module loaded, on a busy machine


def _address() -> str:
    """Of this machine, as the cluster knows it."""
    found: Any = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return str(found)


class WorkerActor:
    """What runs in the actor: a relay and its worker, by that one's name; two while the one takes the other's place.

    Args:
        folder: that relative paths of the configuration begin in; left as it is where this machine has no such folder.
        processors: that the worker is to use.
    """

    def __init__(self, folder: str, processors: float) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._folder = folder
        self._lock = threading.Lock()
        self._relays: dict[str, Relay] = {}
        self._processors = processors

    def start(self, name: str, settings: Mapping[str, Any], results: bool) -> None:
        """As `Relay.start`.

        Raises:
            RuntimeError: if another worker runs here, and there is no memory for one more.
        """
        others = [relay.pid for other, relay in list(self._relays.items()) if other != name]
        needed = max((rss_bytes(pid) for pid in others if pid is not None), default=0)
        if problem := room_for(needed, available_bytes()):
            raise RuntimeError(problem)
        here = {"host": _address(), "index": 0, "processors": self._processors}
        here["threads"] = max(1, int(self._processors / 2))
        here |= store_here(settings, self._folder, _address())
        self._relay(name).start({**settings, **here}, results)

    def attach(self, name: str, wanted: Sequence[str]) -> bool:
        """As `Relay.attach`."""
        return self._relay(name).attach(wanted)

    def send(self, name: str, command: Message) -> None:
        """As `Relay.send`."""
        self._relay(name).send(command)

    def poll(self, name: str, wait_s: float) -> tuple[list[Message], list[bytes]]:
        """As `Relay.poll`."""
        return self._relay(name).poll(wait_s)

    def kill(self, name: str) -> None:
        """As `Relay.kill`."""
        self._relay(name).kill()

    def forget(self, name: str) -> None:
        """A worker has ended for good, or is not wanted: kill it if it runs."""
        with self._lock:
            relay = self._relays.pop(name, None)
        if relay is not None:
            relay.kill()

    def streams(self) -> dict[str, list[str]]:
        """The streams that each worker has which runs here."""
        return {name: list(relay.streams) for name, relay in list(self._relays.items()) if relay.pid is not None}

    def _relay(self, name: str) -> Relay:
        with self._lock:
            return self._relays.setdefault(name, Relay())


def actor_of(name: str, group: PlacementGroup, folder: str, cpus: float, gpus: float) -> Any:
    """The actor of a worker, made if there is none: in its bundle of the placement group, started again if it dies."""
    options = {
        "name": f"worker-{number_of(name)}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": cpus,
        "num_gpus": gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number_of(name) - 1),
    }
    methods = {}
    for method in ("start", "attach", "send", "kill", "forget"):
        methods[method] = ray.method(concurrency_group="control")(getattr(WorkerActor, method))
    methods["poll"] = ray.method(concurrency_group="messages")(WorkerActor.poll)
    remote: Any = ray.remote  # whose types lack the groups
    made = remote(concurrency_groups={"control": 2, "messages": 3})(type("WorkerActor", (WorkerActor,), methods))
    return made.options(**options).remote(folder, cpus)


class RayWorker:
    """See `protocol.Worker`. It is used once: its successor is another object of the same name.

    Args:
        name: of the worker.
        actor: returns its actor; may wait.
        settings: as `run_worker` takes them.
        on_message: called with the worker and each message; the last one is {"is": "ended", "reason": …}.
        on_results: called in a thread of its own with a connection through which results come; None for none.
        attach: take over the worker that runs there, if one does, instead of starting another: names of the streams
            that are to run. None to start another in any case.
    """

    def __init__(
        self,
        name: str,
        actor: Callable[[], Any],
        settings: Mapping[str, Any],
        on_message: Callable[[RayWorker, Message], None],
        on_results: Callable[[Connection], None] | None = None,
        *,
        attach: Sequence[str] | None = None,
    ) -> None:
        self._name = name
        self._actor_of = actor
        self._settings = dict(settings)
        self._on_message, self._on_results = on_message, on_results
        self._attach = attach
        self._state: WorkerState = "starting"
        self._killed = threading.Event()
        self._stopped = False
        self._commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def state(self) -> WorkerState:
        """How far it is."""
        return self._state

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._run, name=f"saccade worker {self._name}", daemon=True).start()

    def send(self, command: Message) -> None:
        """Send a command."""
        self._commands.put(command)

    def stop(self) -> None:
        """Have it close everything and end."""
        self._stopped = True
        self.send({"do": "stop"})

    def kill(self) -> None:
        """End it at once."""
        self._killed.set()

    def _run(self) -> None:
        reason = "its actor was killed"
        ours: Connection | None = None
        threads = []
        actor: Any = None
        try:
            actor = self._actor_of()
            if self._on_results is not None:
                theirs, ours = Pipe(duplex=False)
                threads.append(threading.Thread(target=self._receive, args=(theirs,), daemon=True))
            threads.append(threading.Thread(target=self._send, args=(actor,), daemon=True))
            wanted = self._attach
            if wanted is None or not ray.get(actor.attach.remote(self._name, list(wanted)), timeout=START_S):
                ray.get(actor.start.remote(self._name, self._settings, self._on_results is not None), timeout=START_S)
            for thread in threads:
                thread.name = "saccade worker"
                thread.start()
            reason = self._follow(actor, ours)
        except ray.exceptions.GetTimeoutError:
            reason = "its actor has not answered"
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=False)  # where its machine is there, another takes its place
        except Exception as error:
            reason = _reason_of(error)
        if actor is not None and self._stopped:
            with contextlib.suppress(Exception):
                actor.forget.remote(self._name)
        self._commands.put(None)
        if ours is not None:
            ours.close()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        self._state = "ended"
        self._on_message(self, {"is": "ended", "reason": reason})

    def _receive(self, results: Connection) -> None:
        assert self._on_results is not None
        with results:
            self._on_results(results)

    def _follow(self, actor: Any, results: Connection | None) -> str:
        """Hand on what the worker says until it has ended; returns the reason."""
        reason = ""
        while not self._killed.is_set():
            silent_s = SILENT_S if self._state == "ready" else _LOADING_S
            messages, found = ray.get(actor.poll.remote(self._name, POLL_S), timeout=POLL_S + silent_s)
            for data in found:
                if results is not None:
                    results.send_bytes(data)
            for message in messages:
                if message["is"] == "ended":
                    return reason or str(message["reason"])
                if message["is"] == "ready":
                    self._state = "ready"
                elif message["is"] == "failed":
                    reason = message["error"]
                self._on_message(self, message)
        ray.get(actor.kill.remote(self._name), timeout=SILENT_S)
        return "it did not answer"

    def _send(self, actor: Any) -> None:
        while (command := self._commands.get()) is not None:
            try:
                ray.get(actor.send.remote(self._name, command), timeout=SILENT_S)
            except Exception as error:  # `_follow` sees it, too
                log.debug("worker %s: %s", self._name, error)


def _reason_of(error: Exception) -> str:
    if isinstance(error, ray.exceptions.RayActorError):
        return "its actor has died"
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    return one_line(str(error)) or type(error).__name__
