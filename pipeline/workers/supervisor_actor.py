"""The supervisor of workers, with the front of all: as an actor of a cluster, or in the command's process.

As an actor it is detached and named, so that it outlives the command and is found; started again, it takes over the
workers as they run. It keeps the desired state on its machine's disk. What a configuration holds, passwords too, comes
by calls: what an actor is made with is stored by Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_placement_group

from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import StreamError, one_line
from saccade.pipeline.workers.desired.file import StateFile
from saccade.pipeline.workers.desired.state import DesiredState
from saccade.pipeline.workers.front.front import CLOSE_S, Front, opened_front, streams_of
from saccade.pipeline.workers.front.reload import Changer
from saccade.pipeline.workers.placement import Placement
from saccade.pipeline.workers.protocol import Message, Worker
from saccade.pipeline.workers.ray_worker import RayWorker, actor_of
from saccade.pipeline.workers.states import number_of

log = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
GROUP = "saccade"
_SAVE_S = 0.2
_ASK_S = 10.0
_MAX_WARNINGS = 200


class SupervisorActor:
    """What runs in the actor.

    Args:
        folder: that relative paths of the configuration begin in.
        state: path of the file of the desired state.
        local: it runs in the command's process, and its workers on this machine alone.

    Raises:
        ConfigError: if the state cannot be kept there.
    """

    def __init__(self, folder: str, state: str, *, local: bool = False) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._folder, self._local = folder, local
        self._file = StateFile(Path(state))
        self._stack = ExitStack()
        self._front: Front | None = None
        self._changer: Changer | None = None
        self._warnings: deque[str] = deque(maxlen=_MAX_WARNINGS)
        self._closing = threading.Event()
        self._saving = threading.Lock()  # over the state, from reading it to keeping it
        self._error: tuple[str, str] | None = None
        if local:
            return  # which shows warnings itself
        logging.getLogger("saccade").addHandler(_Lines(self._warnings))
        if ray.get_runtime_context().was_current_actor_reconstructed and "config" in self._file.state.settings:
            self._open(self._file.state.settings["config"], again=True)

    def begin(self, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """Begin to run what is configured, unless it has begun.

        Args:
            values: of a `RunConfig`.

        Returns:
            The kind and the message of an error, if it cannot be.
        """
        if self._front is None:
            self._open(values, again=False)
        return self._error

    @property
    def front(self) -> Front | None:
        """What runs, once it has begun."""
        return self._front

    @property
    def changer(self) -> Changer | None:
        """By which it runs something else, once it has begun."""
        return self._changer

    def update(self, values: Mapping[str, Any]) -> list[str]:
        """Run what another configuration says; returns a line for each change.

        Where workers are replaced for it, they go on to be when this returns.
        """
        return [] if self._changer is None else self._changer.apply(RunConfig.model_validate(dict(values)))

    def _taken(self, config: RunConfig) -> None:
        """What is configured now runs: it is to run again, too."""
        assert self._front is not None
        values = config.model_dump(mode="json", exclude_unset=True)
        with self._saving:
            state = desired_of(self._file.state, self._front).with_setting("config", values)
            state = state.with_setting("workers", [seat.name for seat in self._front.supervisor.seats()])
            self._file.save(state.with_setting("configured", sorted(streams_of(config)[0])))

    def status(self) -> dict[str, Any]:
        """How things are: for the command, several times a second."""
        front = self._front
        if front is None:
            return {"begun": False}
        opened = False
        try:
            opened = front.check()
        except Exception as error:
            self._error = type(error).__name__, one_line(str(error))
        warnings = [self._warnings.popleft() for _ in range(len(self._warnings))]
        streams = front.supervisor.streams()
        reports = {
            one.name: (seat.name, asdict(one))
            for seat in front.supervisor.seats()
            if seat.report is not None
            for one in seat.report.streams
        }
        over = opened and not front.endless and all(stream.phase == "failed" for stream in streams.values())
        return {
            "begun": True,
            "opened": opened,
            "over": over,
            "error": self._error,
            "warnings": warnings,
            "reports": reports,
            "url": front.url,
        }

    def close(self, timeout_s: float = CLOSE_S) -> dict[str, Message]:
        """End everything; returns what each stream that has ended has counted.

        Raises:
            RunFailed: in the command's process, as `Front.close`.
        """
        self._closing.set()
        front = self._front
        if front is None:
            return {}
        try:
            with contextlib.suppress(*([] if self._local else [Exception])):
                front.close(timeout_s)
        finally:
            self._stack.close()
            self._file.close()
        return front.supervisor.finished()

    def _open(self, values: Mapping[str, Any], *, again: bool) -> None:
        """Open the front, and have run what is configured, or, started anew, what was to run last."""
        try:
            config = RunConfig.model_validate(dict(values))
            state = self._file.state
            configured = set(state.settings.get("configured", []))
            kept = {name: dict(one) for name, one in state.streams.items() if again or name not in configured}
            secret = state.settings.get("secret") or secrets.token_urlsafe(32)
            workers = state.settings.get("workers", [])
            if len(workers) != config.workers:
                workers = [str(number) for number in range(1, config.workers + 1)]
            self._adopted, placement = self._find_workers(workers), Placement()
            placement.adopt({stream: worker for worker, streams in self._adopted.items() for stream in streams})
            opening = config.model_copy(update={"source": "", "streams": []}) if again else config
            self._config = config
            self._front = self._stack.enter_context(
                opened_front(opening, self._make, secret=secret, placement=placement, names=workers)
            )
            self._changer = Changer(self._front, config, self._taken)
            names = state.settings.get("configured", []) if again else self._front.first_names
            state = state.with_setting("config", dict(values)).with_setting("secret", secret)
            self._file.save(state.with_setting("configured", sorted(names)))
            self._wanted = sorted({*kept, *names})
            self._front.endless = not names and not kept
            self._front.start(also=kept)
            for name, one in kept.items():
                with contextlib.suppress(StreamError):  # it is configured now, under the same name
                    self._front.supervisor.open(one, name, or_similar=False)
            if again:  # also those without a worker now have events
                for machine, url in state.settings.get("machines", {}).items():
                    self._front.stores.meet(machine, url)
            threading.Thread(target=self._save, name="saccade state", daemon=True).start()
        except Exception as error:
            self._stack.close()
            self._front = None
            self._error = type(error).__name__, one_line(str(error))

    def _find_workers(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The streams that each worker runs already; others, which were to take the place of one, are ended."""
        asked: dict[Any, Any] = {}
        for name in names:
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(f"worker-{number_of(name)}")
                asked[actor.streams.remote()] = actor
        found: dict[str, list[str]] = {}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_S) if asked else ([], [])
        for answer in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                workers: Any = ray.get(answer)
                found |= {name: streams for name, streams in workers.items() if name in names}
                ray.get([asked[answer].forget.remote(name) for name in workers.keys() - set(names)], timeout=_ASK_S)
        return found

    def _make(
        self,
        name: str,
        settings: Mapping[str, Any],
        on_message: Callable[[Worker, Message], None],
        on_results: Callable[[bytes], None] | None,
    ) -> Worker:
        settings = {**settings, "front_node": ray.get_runtime_context().get_node_id()}
        attach = self._wanted if self._adopted.pop(name, None) is not None else None

        def actor() -> Any:
            group = get_placement_group(GROUP)
            bundle: Any = group.bundle_specs[number_of(name) - 1]
            processors = None if self._local else self._config.ray_cpus
            return actor_of(name, group, self._folder, bundle["CPU"], bundle.get("GPU", 0.0), processors)

        return RayWorker(name, actor, settings, on_message, on_results, attach=attach)

    def _save(self) -> None:
        """Keep what is to run whenever that changes."""
        failed = False
        while not self._closing.wait(_SAVE_S):
            front = self._front
            if front is None:
                return
            try:
                with self._saving:
                    state = desired_of(self._file.state, front)
                    if self._changer is not None and not self._changer.rolling:
                        state = state.with_setting("workers", [seat.name for seat in front.supervisor.seats()])
                    self._file.save(state)
                failed = False
            except (OSError, ValueError) as error:
                if not failed:
                    log.warning("what is to run cannot be kept: %s", error)
                failed = True


def desired_of(state: DesiredState, front: Front) -> DesiredState:
    """The state with the live streams that are to run now, and the machines that store events."""
    streams = front.supervisor.streams()
    wanted = {
        name: dict(stream.config) for name, stream in streams.items() if not stream.removed and stream.live is not False
    }
    for name in state.streams:
        if name not in wanted:
            state = state.without_stream(name)
    for name, config in wanted.items():
        state = state.with_stream(name, config)
    return state.with_setting("machines", front.stores.remote_urls())


class _Lines(logging.Handler):
    """Keeps warnings as lines."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(one_line(record.getMessage()))
