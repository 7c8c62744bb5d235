"""Ray as a command sees it, local or a cluster: connects, reserves room for workers, makes their actors, ends all."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from saccade.pipeline.config import RunConfig
from saccade.pipeline.control.stores import end_stores
from saccade.pipeline.errors import ConfigError, one_line

GROUP = "saccade"
_ROOM_S = 60.0  # for other programs to give back what they had
_MAX_WORKERS = 64
_OBJECT_STORE_BYTES = 80 << 20  # little more than Ray's least: nothing goes through it
_CALLS_AT_ONCE = 16  # of a worker: one that waits for a camera or a disk keeps no other waiting

_GUARD = """
import os, select, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
command, seen = os.getppid(), {}
def running():
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(") ")[2].split()
            found[int(name)] = int(fields[1]), fields[19]
        except OSError:
            pass
    return found
while not select.select([sys.stdin], [], [], 2.0)[0]:  # until the command has ended, in whatever way
    now, more = running(), {command}
    seen = {pid: start for pid, start in seen.items() if now.get(pid, (0, ""))[1] == start}
    while more:
        more = {pid for pid, (parent, _) in now.items() if parent in more and pid != os.getpid()}
        seen.update((pid, now[pid][1]) for pid in more)
now = running()
for pid, start in seen.items():
    if pid in now and now[pid][1] == start:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
"""
"""Ends the processes of a local Ray with its command: some of them would stay for a minute after `kill -9`. They are
known by their parents, which only hold while the command runs."""


class RayCluster:
    """Connected from construction on, until `close`.

    Args:
        config: whose `ray` is the address of a cluster, or `auto` for the one that this machine belongs to; None starts
            a Ray of this machine for its `workers`, which ends with this process.
        state: the file by which this run is told from others of the cluster.

    Attributes:
        local: whether it was started here.

    Raises:
        ConfigError: if there is no cluster, or it does not admit this machine.
    """

    def __init__(self, config: RunConfig, state: Path) -> None:
        self.local = config.ray is None
        self._config = config
        self._guard = _guard() if self.local else None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        quiet["namespace"] = f"saccade-{hashlib.sha256(str(state.absolute()).encode()).hexdigest()[:16]}"
        # It would print that a worker died, which is reported here, among the records on stdout.
        setattr(ray._private.worker, "print_to_stdstream", lambda *arguments, **options: None)  # noqa: B010
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self.local:
                with _without_hangup():
                    ray.init(
                        address="local",
                        num_cpus=config.workers,
                        include_dashboard=False,
                        object_store_memory=_OBJECT_STORE_BYTES,
                        **quiet,
                    )
            else:
                ray.init(address=config.ray, **quiet)
        except SystemExit:  # a handler of Ray's took a SIGTERM for its own
            _restore(handlers)
            signal.raise_signal(signal.SIGTERM)
            raise
        except Exception as error:
            self.close()
            problem = one_line(str(error))[:200]
            where = "--workers: Ray does not start" if self.local else f"--ray: no Ray cluster at {config.ray}"
            raise ConfigError(f"{where}: {problem}") from None
        finally:
            _restore(handlers)

    @property
    def node(self) -> str:
        """Ray's id of this machine."""
        return str(ray.get_runtime_context().get_node_id())

    def place(self) -> None:
        """Reserve room for workers, on as many machines as there are, unless workers of this run are there already.

        Raises:
            ConfigError: if the cluster has none.
        """
        workers, cpus, gpus = self._config.workers, self._config.ray_cpus, self._config.ray_gpus
        if self.local:
            cpus, gpus = 1.0, gpus or self._gpus_each(workers)
        elif (group := _group()) is not None:
            if len(group.bundle_specs) == workers and any(_actor(str(number)) for number in range(1, workers + 1)):
                self._group = group
                return
            self.end()  # another number of workers, or what a command has left that was killed early
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        lifetime = None if self.local else "detached"
        strategy = "PACK" if self.local else "SPREAD"
        self._group = placement_group([bundle] * workers, strategy=strategy, name=GROUP, lifetime=lifetime)
        if not self._group.wait(_ROOM_S):
            remove_placement_group(self._group)
            free: Any = ray.available_resources()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"--ray: the cluster has no room for {workers} workers of {cpus:g} CPUs and {gpus:g} GPUs: free are "
                f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g}; change --workers, --ray-cpus or --ray-gpus"
            )

    def _gpus_each(self, workers: int) -> float:
        """The share of a GPU that each local worker has: as many on each GPU, or 1."""
        found: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = int(found.get("GPU", 0))
        return 0.0 if self._config.device == "cpu" or not gpus else 1.0 / -(-workers // gpus)

    def actor_of(self, name: str, kind: type) -> Any:
        """The actor of a worker: the one that runs, or made in its bundle of the placement group.

        Ray starts it again if it dies. On a cluster it outlives this process.

        Args:
            name: of the worker, a number from 1.
            kind: the actor's class.
        """
        bundle: Any = self._group.bundle_specs[int(name) - 1]
        options: dict[str, Any] = {
            "name": f"worker-{name}",
            "get_if_exists": True,
            "max_restarts": -1,
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, int(name) - 1),
        }
        if not self.local:
            options["lifetime"] = "detached"
        methods: dict[str, Any] = {}
        for method in (one for one in vars(kind) if not one.startswith("_")):
            # While Ray starts the actor again, a worker's start waits for it.
            retries = -1 if method == "start" else 0
            group = {"poll": "messages", "start": "control"}.get(method, "calls")
            methods[method] = ray.method(concurrency_group=group, max_task_retries=retries)(getattr(kind, method))
        remote: Any = ray.remote  # whose types lack the groups
        made = remote(concurrency_groups={"control": 2, "messages": 2, "calls": _CALLS_AT_ONCE})(
            type(kind.__name__, (kind,), methods)
        )
        return made.options(**options).remote()

    def end(self) -> None:
        """End all workers of this run, and give back the room."""
        for number in range(1, _MAX_WORKERS + 1):
            if (actor := _actor(str(number))) is not None:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(actor)
            elif number > self._config.workers:
                break
        if not self.local:
            end_stores()
        if (group := _group()) is not None:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                remove_placement_group(group)

    def close(self) -> None:
        """Leave the cluster; a local Ray ends."""
        ray.shutdown()
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _actor(name: str) -> Any:
    try:
        return ray.get_actor(f"worker-{name}")
    except ValueError:
        return None


def _group() -> Any:
    try:
        return get_placement_group(GROUP)
    except ValueError:
        return None


def _guard() -> subprocess.Popen[bytes] | None:
    """The process that runs `_GUARD`; None where there is no /proc."""
    if sys.platform != "linux":
        return None
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE)


def _restore(handlers: Mapping[int, Any]) -> None:
    """Have signals do again what they did: Ray has handlers of its own, which dump the stack and end the process."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _without_hangup() -> Iterator[None]:
    """Start Ray's processes so that they ignore the SIGHUP of a terminal: the command decides."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if hasattr(signal, "SIGHUP") else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)
