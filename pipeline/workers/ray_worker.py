"""A worker as a Ray actor: placed, started again and counted by Ray; frames never leave its process.

The actor holds the engine and its streams (`WorkerRun`) behind a `Relay`. Commands and messages are calls of the actor;
neither they nor results, which are small, go through the object store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from saccade.pipeline.errors import one_line
from saccade.pipeline.workers.memory import available_bytes, room_for, rss_bytes
from saccade.pipeline.workers.protocol import Message, WorkerState
from saccade.pipeline.workers.relay import Relay
from saccade.pipeline.workers.states import number_of
from saccade.pipeline.workers.store_actor import store_here

log = logging.getLogger(__name__)

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
    """What runs in the actor: a worker, by its name; two while the one takes the other's place.

    Args:
        folder: that relative paths of the configuration begin in; left as it is where this machine has no such folder.
        processors: that the worker is to use; None on the machine of the command, which knows.
    """

    def __init__(self, folder: str, processors: float | None) -> None:
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
        others = [relay for other, relay in list(self._relays.items()) if other != name and relay.alive]
        if others and (problem := room_for(rss_bytes(os.getpid()), available_bytes())):
            raise RuntimeError(problem)
        here: dict[str, Any] = {}
        if self._processors is not None:
            here = {"host": _address(), "index": 0, "threads": max(1, int(self._processors / 2))}
        here |= store_here(settings, self._folder, _address())
        with self._lock:
            self._relays[name] = relay = Relay()
        relay.start({**settings, **here}, results)

    def attach(self, name: str, wanted: Sequence[str]) -> bool:
        """As `Relay.attach`; False if there is none."""
        relay = self._relays.get(name)
        return relay is not None and relay.attach(wanted)

    def send(self, name: str, command: Message) -> None:
        """As `Relay.send`."""
        if (relay := self._relays.get(name)) is not None:
            relay.send(command)

    def poll(self, name: str, wait_s: float) -> tuple[list[Message], list[bytes]]:
        """As `Relay.poll`; that it has ended if there is none."""
        relay = self._relays.get(name)
        return ([{"is": "ended", "reason": "its actor has died"}], []) if relay is None else relay.poll(wait_s)

    def forget(self, name: str) -> None:
        """A worker has ended for good, or is not wanted: stop it if it runs."""
        with self._lock:
            relay = self._relays.pop(name, None)
        if relay is not None:
            relay.send({"do": "stop"})

    def streams(self) -> dict[str, list[str]]:
        """The streams that each worker has which runs here."""
        return {name: list(relay.streams) for name, relay in list(self._relays.items()) if relay.alive}


def actor_of(name: str, group: PlacementGroup, folder: str, cpus: float, gpus: float, processors: float | None) -> Any:
    """The actor of a worker, made if there is none: in its bundle of the placement group, started again if it dies."""
    options = {
        "name": f"worker-{number_of(name)}",
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": cpus,
        "num_gpus": gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number_of(name) - 1),
    }
    methods = {}
    for method in ("start", "attach", "send", "forget"):
        # While Ray starts the actor again, a worker's start waits for it.
        retries = -1 if method in ("start", "attach") else 0
        methods[method] = ray.method(concurrency_group="control", max_task_retries=retries)(
            getattr(WorkerActor, method)
        )
    methods["poll"] = ray.method(concurrency_group="messages")(WorkerActor.poll)
    remote: Any = ray.remote  # whose types lack the groups
    made = remote(concurrency_groups={"control": 2, "messages": 3})(type("WorkerActor", (WorkerActor,), methods))
    return made.options(**options).remote(folder, processors)


class RayWorker:
    """See `protocol.Worker`. It is used once: its successor is another object of the same name.

    Args:
        name: of the worker.
        actor: returns its actor; may wait.
        settings: as `WorkerRun` takes them.
        on_message: called with the worker and each message; the last one is {"is": "ended", "reason": …}.
        on_results: called with each result for the outputs that streams share; None for none.
        attach: take over the worker that runs there, if one does, instead of starting another: names of the streams
            that are to run. None to start another in any case.
    """

    def __init__(
        self,
        name: str,
        actor: Callable[[], Any],
        settings: Mapping[str, Any],
        on_message: Callable[[RayWorker, Message], None],
        on_results: Callable[[bytes], None] | None = None,
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
        sending: threading.Thread | None = None
        actor: Any = None
        try:
            actor = self._actor_of()
            wanted = self._attach
            if wanted is None or not ray.get(actor.attach.remote(self._name, list(wanted)), timeout=START_S):
                ray.get(actor.start.remote(self._name, self._settings, self._on_results is not None), timeout=START_S)
            sending = threading.Thread(target=self._send, args=(actor,), name="saccade commands", daemon=True)
            sending.start()
            reason = self._follow(actor)
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
        if sending is not None:
            sending.join()
        self._state = "ended"
        self._on_message(self, {"is": "ended", "reason": reason})

    def _follow(self, actor: Any) -> str:
        """Hand on what the worker says until it has ended; returns the reason."""
        reason = ""
        while not self._killed.is_set():
            silent_s = SILENT_S if self._state == "ready" else _LOADING_S
            messages, found = ray.get(actor.poll.remote(self._name, POLL_S), timeout=POLL_S + silent_s)
            if self._on_results is not None:
                for data in found:
                    self._on_results(data)
            for message in messages:
                if message["is"] == "ended":
                    return reason or str(message["reason"])
                if message["is"] == "ready":
                    self._state = "ready"
                elif message["is"] == "failed":
                    reason = message["error"]
                self._on_message(self, message)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor, no_restart=False)
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
