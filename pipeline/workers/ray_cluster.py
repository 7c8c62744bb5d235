"""Ray as a command sees it, local or a cluster: connects, reserves room for workers, has a supervisor, ends all."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import ConfigError, one_line
from saccade.pipeline.workers.protocol import Message
from saccade.pipeline.workers.store_actor import end_stores
from saccade.pipeline.workers.supervisor_actor import GROUP, SUPERVISOR, SupervisorActor

_ROOM_S = 60.0  # for other programs to give back what they had
_ASK_S = 10.0
_BEGIN_S = 120.0  # for an actor to be scheduled and its module loaded, on a busy machine
_MAX_WORKERS = 64
_OBJECT_STORE_BYTES = 80 << 20  # little more than Ray's least: nothing goes through it


class RayCluster:
    """Connected from construction on, until `close`.

    Args:
        config: whose `ray` is the address of a cluster, or `auto` for the one that this machine belongs to; None starts
            a Ray of this machine for its `workers`, which ends with this process. `ray_state` names what is apart from
            other commands on one cluster.

    Attributes:
        local: whether it was started here.

    Raises:
        ConfigError: if there is no cluster, or it does not admit this machine.
    """

    def __init__(self, config: RunConfig) -> None:
        self.local = config.ray is None
        self._config = config
        self._state = Path(config.ray_state).absolute()
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        quiet["namespace"] = f"saccade-{hashlib.sha256(str(self._state).encode()).hexdigest()[:16]}"
        # It would print that a worker died, which is reported here, among the records on stdout.
        setattr(ray._private.worker, "print_to_stdstream", lambda *arguments, **options: None)  # noqa: B010
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
        except Exception as error:
            problem = one_line(str(error))[:200]
            where = "--workers: Ray does not start" if self.local else f"--ray: no Ray cluster at {config.ray}"
            raise ConfigError(f"{where}: {problem}") from None

    def place(self) -> bool:
        """Reserve room for workers, on as many machines as there are; False if a supervisor has done so already.

        Raises:
            ConfigError: if the cluster has none.
        """
        with contextlib.suppress(ValueError):
            ray.get_actor(SUPERVISOR)
            return False
        workers, cpus, gpus = self._config.workers, self._config.ray_cpus, self._config.ray_gpus
        if self.local:
            cpus, gpus = 1.0, gpus or self._gpus_each(workers)
        else:
            self.end(0.0)  # what another command has left, that was killed early
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        strategy = "PACK" if self.local else "SPREAD"
        group = placement_group([bundle] * workers, strategy=strategy, name=GROUP, lifetime="detached")
        if not group.wait(_ROOM_S):
            remove_placement_group(group)
            free: Any = ray.available_resources()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"--ray: the cluster has no room for {workers} workers of {cpus:g} CPUs and {gpus:g} GPUs: free are "
                f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g}; change --workers, --ray-cpus or --ray-gpus"
            )
        return True

    def _gpus_each(self, workers: int) -> float:
        """The share of a GPU that each local worker has: as many on each GPU, or 1."""
        found: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = int(found.get("GPU", 0))
        return 0.0 if self._config.device == "cpu" or not gpus else 1.0 / -(-workers // gpus)

    def supervisor(self, folder: Path) -> SupervisorActor | RemoteSupervisor:
        """The supervisor: in this process for a local Ray, else the cluster's, made on this machine if there is none.

        Args:
            folder: that relative paths of the configuration begin in.

        Raises:
            ConfigError: if it cannot run.
        """
        if self.local:
            return SupervisorActor(str(folder), str(self._state), local=True)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        made = ray.remote(SupervisorActor).options(
            name=SUPERVISOR,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=here,
        )
        return RemoteSupervisor(made.remote(str(folder), str(self._state)))

    def end(self, timeout_s: float) -> dict[str, Message]:
        """End the cluster's supervisor with all workers and give back the room; returns what streams have counted."""
        finished: dict[str, Message] = {}
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            supervisor = ray.get_actor(SUPERVISOR)
            with contextlib.suppress(ray.exceptions.RayError):
                closed: Any = ray.get(supervisor.close.remote(timeout_s), timeout=timeout_s + _ASK_S)
                finished = closed
            ray.kill(supervisor)
        for number in range(1, _MAX_WORKERS + 1):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(f"worker-{number}"))
        end_stores(_ASK_S)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            remove_placement_group(get_placement_group(GROUP))
        return finished

    def close(self) -> None:
        """Leave the cluster; a local Ray ends."""
        ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteSupervisor:
    """The supervisor of a cluster, by calls of its actor. Methods are as those of `SupervisorActor`.

    Args:
        actor: of it.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """As there; raises ConfigError if it cannot run."""
        found: tuple[str, str] | None = self._ask(self._actor.begin, values)
        return found

    def update(self, values: Mapping[str, Any]) -> list[str]:
        """As there; raises ConfigError if it cannot run."""
        lines: list[str] = self._ask(self._actor.update, values)
        return lines

    def status(self) -> dict[str, Any] | None:
        """As there; None if it does not answer now."""
        try:
            found: Any = ray.get(self._actor.status.remote(), timeout=_ASK_S)
        except ray.exceptions.RayError:
            return None
        return dict(found)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return ray.get(method.remote(*arguments), timeout=_BEGIN_S)
        except ray.exceptions.RayTaskError as error:
            raise ConfigError(one_line(str(error.cause))) from None
        except ray.exceptions.RayError as error:
            raise ConfigError(f"--ray: the supervisor cannot run: {_last_line(error)}") from None


@contextmanager
def _without_hangup() -> Iterator[None]:
    """Start Ray's processes so that they ignore the SIGHUP of a terminal: the command decides."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if hasattr(signal, "SIGHUP") else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1])[:200] if lines else type(error).__name__
