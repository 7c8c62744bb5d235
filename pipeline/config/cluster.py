"""The settings of `saccade run --ray`: which cluster, what each worker takes of it, and where the desired state is."""

from __future__ import annotations

from saccade.distribution import install_command
from saccade.pipeline.settings import FileText, NullIsUnset, Text, setting


class ClusterSettings(NullIsUnset):
    """Where workers run that are not on this machine alone."""

    ray: Text | None = setting(
        None,
        "Run the workers on this Ray cluster: its address, or auto.",
        more=f"On as many machines as it can, each with this program installed: {install_command('ray')}. A "
        "supervisor on this machine keeps what is to run, and outlives this command if that is killed.",
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
    ray_state: FileText = setting(
        "saccade-state/desired.db",
        "File of what is to run on workers, also streams that were added over http; for its owner alone.",
        metavar="FILE",
    )
