"""The settings of `saccade run --ray`: the cluster, and the resources of each worker."""

from __future__ import annotations

from saccade.distribution import install_command
from saccade.pipeline.settings import NullIsUnset, Text, setting


class ClusterSettings(NullIsUnset):
    """The settings for workers on a Ray cluster."""

    ray: Text | None = setting(
        None,
        "Run the workers on this Ray cluster: its address, or auto.",
        more=f"On as many machines as it can, each with this program installed: {install_command('ray')}. Workers go "
        "on if this command is killed, and the same command finds them again.",
        metavar="ADDRESS",
    )
    ray_cpus: float = setting(
        1.0, "Processors that each worker takes of the Ray cluster.", metavar="N", ge=0.1, le=1024
    )
    ray_gpus: float = setting(
        0.0,
        "GPUs that each worker takes of the Ray cluster: 1, or 0.5 for two workers on each.",
        metavar="N",
        ge=0,
        le=64,
    )
