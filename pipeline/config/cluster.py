"""The settings of `saccade run --ray`: the Ray cluster, and the resources of each worker."""

from __future__ import annotations

from saccade.distribution import install_command
from saccade.pipeline.settings import NullIsUnset, Text, setting


class ClusterSettings(NullIsUnset):
    """The settings for workers on a Ray cluster."""

    ray: Text | None = setting(
        None,
        "Run the workers on this Ray cluster: its address, or auto.",
        more=f"The workers are spread over the machines. Install Saccade on each machine: "
        f"{install_command('ray')}. If this command is killed, the workers continue, and the same command "
        f"reconnects to them.",
        metavar="ADDRESS",
    )
    ray_cpus: float = setting(
        1.0, "Number of CPUs that each worker reserves in the Ray cluster.", metavar="N", ge=0.1, le=1024
    )
    ray_gpus: float = setting(
        0.0,
        "Number of GPUs that each worker reserves in the Ray cluster; 0.5 puts two workers on a GPU.",
        metavar="N",
        ge=0,
        le=64,
    )
