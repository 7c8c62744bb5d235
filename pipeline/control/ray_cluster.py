"""Connects to Ray, reserves resources for the workers, and creates and stops the workers' actors."""

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

log = logging.getLogger(__name__)
GROUP = "saccade"
_ROOM_S = 60.0  # wait for other programs to release resources
_MAX_WORKERS = 64
_OBJECT_STORE_BYTES = 80 << 20  # slightly more than Ray's minimum, because the object store is unused
_CALLS_AT_ONCE = (
    16  # concurrent calls of a worker, so that a call that waits for a camera or disk does not block others
)

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
"""A script that kills the processes of a local Ray when the process that started Ray ends. Otherwise some of them
survive `kill -9` for a minute. The script finds them by their parent process IDs while the process runs."""


class RayCluster:
    """A connection to Ray. The constructor connects, and `close` disconnects.

    Args:
        config: configuration. `config.ray` is the address of a cluster, or `auto` for a cluster on this machine. None
            starts a local Ray, which ends with this process.
        state: path of the state file. The path identifies this run in the cluster.

    Attributes:
        local: whether this process started Ray.

    Raises:
        ConfigError: if the cluster does not exist or rejects this machine.
    """

    def __init__(self, config: RunConfig, state: Path) -> None:
        self.local = config.ray is None
        self._config = config
        self._guard = _guard() if self.local else None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        quiet["namespace"] = f"saccade-{hashlib.sha256(str(state.absolute()).encode()).hexdigest()[:16]}"
        # Ray would print dead workers, which are reported here, between the records on stdout.
        setattr(ray._private.worker, "print_to_stdstream", lambda *arguments, **options: None)  # noqa: B010
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self.local:
                _start_local(config.workers, quiet)
            else:
                ray.init(address=config.ray, **quiet)
        except SystemExit:  # a signal handler of Ray caught a SIGTERM
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
        """The node ID that Ray assigned to this machine."""
        return str(ray.get_runtime_context().get_node_id())

    def place(self) -> None:
        """Reserve resources for the workers, distributed over the machines of the cluster.

        Do nothing if workers of this run already exist.

        Raises:
            ConfigError: if the cluster does not have enough resources.
        """
        workers, cpus, gpus = self._config.workers, self._config.ray_cpus, self._config.ray_gpus
        if self.local:
            cpus, gpus = 1.0, gpus or self._gpus_each(workers)
        elif (group := _group()) is not None:
            if len(group.bundle_specs) == workers and any(_actor(str(number)) for number in range(1, workers + 1)):
                self._group = group
                return
            self.end()  # another number of workers, or leftovers of a killed command
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        lifetime = None if self.local else "detached"
        strategy = "PACK" if self.local else "SPREAD"
        self._group = placement_group([bundle] * workers, strategy=strategy, name=GROUP, lifetime=lifetime)
        if not self._group.wait(_ROOM_S):
            remove_placement_group(self._group)
            free: Any = ray.available_resources()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"--ray: {workers} workers with {cpus:g} CPUs and {gpus:g} GPUs each do not fit; the cluster has "
                f"{free.get('CPU', 0):g} free CPUs and {free.get('GPU', 0):g} free GPUs; "
                "change --workers, --ray-cpus or --ray-gpus"
            )

    def _gpus_each(self, workers: int) -> float:
        """Return the fraction of a GPU (0 to 1) that Ray reserves for each worker on this machine."""
        found: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = int(found.get("GPU", 0))
        return 0.0 if self._config.device == "cpu" or not gpus else 1.0 / -(-workers // gpus)

    def actor_of(self, name: str, kind: type) -> Any:
        """Return the actor of a worker. Create the actor on the resources reserved for the worker if it does not exist.

        Args:
            name: name of the worker, a number from 1.
            kind: class of the actor.
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
            # The start of a worker waits while Ray restarts the actor.
            retries = -1 if method == "start" else 0
            group = {"poll": "messages", "start": "control"}.get(method, "calls")
            methods[method] = ray.method(concurrency_group=group, max_task_retries=retries)(getattr(kind, method))
        remote: Any = ray.remote  # its type hints lack the concurrency groups
        made = remote(concurrency_groups={"control": 2, "messages": 2, "calls": _CALLS_AT_ONCE})(
            type(kind.__name__, (kind,), methods)
        )
        return made.options(**options).remote()

    def end(self) -> None:
        """Stop all workers of this run, and release the resources that were reserved for them."""
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
        """Disconnect from Ray. If this process started Ray, stop it."""
        ray.shutdown()
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_local(workers: int, options: dict[str, Any]) -> None:
    """Start Ray on this machine. Retry once, because Ray waits too briefly for its processes on a busy machine."""
    for retry in (True, False):
        try:
            with _without_hangup():
                ray.init(
                    address="local",
                    num_cpus=workers,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    **options,
                )
        except Exception as error:
            if not retry:
                raise
            log.warning("Ray did not start: %s; retrying", one_line(str(error))[:200])
            ray.shutdown()
        else:
            return


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
    """Start a watchdog process, which kills the child processes of Saccade when Saccade ends.

    Return None on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE)


def _restore(handlers: Mapping[int, Any]) -> None:
    """Restore the signal handlers of Saccade. Ray replaces them with handlers that print the stack and exit."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _without_hangup() -> Iterator[None]:
    """Start Ray's processes with SIGHUP ignored, so that a closed terminal does not end them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if hasattr(signal, "SIGHUP") else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)
