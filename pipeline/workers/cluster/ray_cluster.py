"""A Ray cluster as a command sees it: connects, reserves room for workers, finds or makes the supervisor, ends all."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from saccade.pipeline.errors import ConfigError, one_line
from saccade.pipeline.workers.cluster.ray_worker import NAMESPACE
from saccade.pipeline.workers.cluster.store_actor import end_stores
from saccade.pipeline.workers.cluster.supervisor_actor import GROUP, SUPERVISOR, SupervisorActor
from saccade.pipeline.workers.protocol import Message

_ROOM_S = 60.0  # for other programs to give back what they had
_ASK_S = 10.0
_BEGIN_S = 120.0  # for an actor to be scheduled and its module loaded, on a busy machine
_MAX_WORKERS = 64


class RayCluster:
    """Connected from construction on, until `close`.

    Args:
        address: of the cluster, or `auto` for the one that this machine belongs to.

    Raises:
        ConfigError: if there is none, or it does not admit this machine.
    """

    def __init__(self, address: str) -> None:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(f"--ray: no Ray cluster at {address}: {one_line(str(error))[:200]}") from None

    def place(self, workers: int, cpus: float, gpus: float) -> bool:
        """Reserve room for workers, on as many machines as there are; False if a supervisor has done so already.

        Raises:
            ConfigError: if the cluster has none.
        """
        with contextlib.suppress(ValueError):
            ray.get_actor(SUPERVISOR, NAMESPACE)
            return False
        self.end(0.0)  # what another command has left, that was killed early
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        group = placement_group([bundle] * workers, strategy="SPREAD", name=GROUP, lifetime="detached")
        if not group.wait(_ROOM_S):
            remove_placement_group(group)
            free: Any = ray.available_resources()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"--ray: the cluster has no room for {workers} workers of {cpus:g} CPUs and {gpus:g} GPUs: free are "
                f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g}; change --workers, --ray-cpus or --ray-gpus"
            )
        return True

    def supervisor(self, folder: Path, state: Path) -> Any:
        """The supervisor of the cluster, made on this machine if there is none.

        Args:
            folder: that relative paths of the configuration begin in.
            state: path of the file of the desired state.
        """
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        made = ray.remote(SupervisorActor).options(
            name=SUPERVISOR,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=here,
        )
        return made.remote(str(folder), str(state))

    def ask(self, method: Any, *arguments: Any) -> Any:
        """What a method of an actor returns.

        Raises:
            ConfigError: if the actor cannot run.
        """
        try:
            return ray.get(method.remote(*arguments), timeout=_BEGIN_S)
        except ray.exceptions.RayTaskError as error:
            raise ConfigError(one_line(str(error.cause))) from None
        except ray.exceptions.RayError as error:
            raise ConfigError(f"--ray: the supervisor cannot run: {_last_line(error)}") from None

    def ask_if_there(self, method: Any, *arguments: Any) -> Any:
        """The same; None if the actor does not answer now."""
        try:
            return ray.get(method.remote(*arguments), timeout=_ASK_S)
        except ray.exceptions.RayError:
            return None

    def end(self, timeout_s: float) -> dict[str, Message]:
        """End the supervisor with all workers and give back the room; returns what streams have counted."""
        finished: dict[str, Message] = {}
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            supervisor = ray.get_actor(SUPERVISOR, NAMESPACE)
            with contextlib.suppress(ray.exceptions.RayError):
                closed: Any = ray.get(supervisor.close.remote(timeout_s), timeout=timeout_s + _ASK_S)
                finished = closed
            ray.kill(supervisor)
        for number in range(1, _MAX_WORKERS + 1):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(f"worker-{number}", NAMESPACE))
        end_stores(_ASK_S)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            remove_placement_group(get_placement_group(GROUP))
        return finished

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1])[:200] if lines else type(error).__name__
