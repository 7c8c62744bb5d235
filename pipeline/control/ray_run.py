"""Opens a run with workers: starts Ray or joins a cluster, opens the shared outputs and starts the workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from saccade.pipeline.config import RunConfig
from saccade.pipeline.control.local import max_bytes_of, opened_store
from saccade.pipeline.control.ray import RayWorkers
from saccade.pipeline.control.ray_cluster import RayCluster
from saccade.pipeline.control.worker_calls import WorkerSettings, is_video, worker_values
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.stream import open_source_of
from saccade.pipeline.runtime.targets import WHEP, Target, check_targets, open_output, targets_of
from saccade.processors import usable_processors


def shared_targets(config: RunConfig) -> list[Target]:
    """Return the outputs that all streams share.

    A video file of a single stream is not included, because the stream's worker writes it.
    """
    alone = len(config.named()) == 1
    return [target for target in targets_of(config) if not target.each and not (alone and is_video(target))]


def check_workers(config: RunConfig) -> None:
    """Check that a configuration is compatible with worker processes (`--workers`).

    Raises:
        ConfigError: if a setting is not supported.
    """
    if config.display:
        raise ConfigError("--display: not supported with workers; remove --workers, or watch with --http")
    if watched := next((target for target in shared_targets(config) if target.text.startswith(WHEP)), None):
        raise ConfigError(
            f"{watched.flag}: {watched.text}: WebRTC output is not supported with workers; watch the video with --http"
        )


def is_file(source: str) -> bool:
    """Return whether a source is a file path, not a URL or a webcam."""
    return not ("://" in source or source.startswith("webrtc:") or source.isdecimal())


def threads_each(workers: int) -> int:
    """Return the number of CPU threads for the engine of each worker, or 0 if OMP_NUM_THREADS sets the number."""
    if "OMP_NUM_THREADS" in os.environ:
        return 0
    # Half of the cores are left to video decoders and encoders.
    return max(1, usable_processors() // (2 * workers))


@contextmanager
def opened_workers(
    config: RunConfig,
    wanted: Sequence[str],
    kind: type,
    state: Path,
    *,
    open_by_default: bool = True,
    given_up: Callable[[], bool] = lambda: False,
) -> Iterator[RayWorkers]:
    """Start Ray or join a cluster, open shared outputs, and start the workers.

    Close everything when the `with` block ends.

    Args:
        config: configuration of the run.
        wanted: names of the desired streams.
        kind: actor class of a worker.
        state: file that identifies this run in a cluster.
        open_by_default: see `SourcePolicy`.
        given_up: returns True to stop waiting for workers.

    Raises:
        ConfigError: if Ray does not start or lacks resources, or if an output would overwrite a source or another
            output.
        SourceError: if a local file cannot be read.
        EngineError, SinkError: if the model cannot be loaded, or an output cannot be opened.
        RunFailed: if an output could not write its last data.
    """
    check_workers(config)
    shared = shared_targets(config)
    sources = [stream.source for stream in config.named().values()]
    own = [Target(text).of(name) for name in config.named() for text in worker_values(config)["sinks"]]
    check_targets([*shared, *own], sources)
    if config.ray is None:
        for stream in config.named().values():
            if is_file(stream.source):
                open_source_of(stream).close()  # reports mistakes before the slow start of Ray and the engines
    with ExitStack() as stack:
        store = stack.enter_context(opened_store(config, keep_open=True))
        cluster = stack.enter_context(RayCluster(config, state))
        cluster.place()
        stack.callback(cluster.end)
        on_cluster = not cluster.local
        common = WorkerSettings(
            worker_values(config),
            threads=max(1, int(config.ray_cpus / 2)) if on_cluster else threads_each(config.workers),
            media=str(store.media_folder) if store else None,
            keep_s=config.store_keep,
            max_bytes=max_bytes_of(config),
            store=config.store if store else None,
            node=cluster.node,
            folder=os.getcwd(),
            cluster=on_cluster,
            open_by_default=open_by_default,
        )
        outputs: list[Output] = []
        with ExitStack() as on_failure:
            for target in shared:
                outputs.append(open_output(target))
                on_failure.callback(outputs[-1].sink.close)
            on_failure.pop_all()
        settings = [
            replace(common, index=0 if on_cluster else number, results=bool(outputs))
            for number in range(config.workers)
        ]
        workers = RayWorkers(settings, lambda name: cluster.actor_of(name, kind), wanted, outputs, store)
        stack.callback(workers.close)
        workers.open(given_up)
        yield workers
