"""Makes of a stream's configuration what a run is given: its source, the model, and what to ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

from saccade.engine.scheduling.task import Task
from saccade.engine.tasks import Detect, Point, Query
from saccade.pipeline.core.bounded_queue import QueuePolicy
from saccade.pipeline.core.config import Prompts, RunConfig, StreamConfig
from saccade.pipeline.core.errors import ConfigError, StreamError
from saccade.pipeline.core.stream_manager import Streams
from saccade.pipeline.core.stream_names import free_name
from saccade.pipeline.core.stream_run import Output, Run
from saccade.sources import HwAccel, Source, Transport, open_source

if TYPE_CHECKING:
    from saccade.engine import Engine

OutputsOf = Callable[[str, Source], list[Output]]


def source_of(config: StreamConfig) -> Source:
    """Open the source of a stream.

    Raises:
        SourceError: if it cannot be used.
    """
    return open_source(
        config.source,
        stream=config.name,
        vid_stride=config.vid_stride,
        start=config.start,
        end=config.end,
        hwaccel=config.hwaccel,
        rtsp_transport=config.rtsp_transport,
    )


def open_once(target: str, hwaccel: str, transport: str) -> Source:
    """Open a source that fails at once, with its code, where `saccade run` would try again.

    Raises:
        ConfigError: if hwaccel or transport is no such thing.
        SourceError: if the target is none.
    """
    for flag, value, known in (("--hwaccel", hwaccel, HwAccel), ("--rtsp-transport", transport, Transport)):
        if value not in get_args(known):
            raise ConfigError(f"{flag}: should be {' or '.join(get_args(known))}, got '{value}'")
    return open_source(target, hwaccel=cast(HwAccel, hwaccel), rtsp_transport=cast(Transport, transport), retry=False)


def load_engine(config: RunConfig, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Load the model that the configuration names, onto the device and in the dtype that it names.

    Args:
        config: names them.
        progress: called with (done, all) while a GPU is prepared; None for nobody to be told.

    Raises:
        EngineError: if there is no such model or device.
    """
    from saccade.engine import (
        Engine,  # brings torch, which takes seconds: whatever is wrong before this is told at once
    )

    return Engine.load(config.model, config.device, config.dtype, progress=progress)


def tasks_for(engine: Engine, prompts: Prompts) -> list[Task]:
    """What the configuration asks of each frame, in the model's own names.

    Raises:
        UnknownClassError: if the model does not know a name.
        ConfigError: if the model has not learned to do what is asked.
    """
    for skill in ("detect", "point", "query"):
        if getattr(prompts, skill) and skill not in engine.model.skills:
            raise ConfigError(f"{engine.model.name} can {' and '.join(engine.model.skills)}, not {skill}")
    return [
        *(Detect(label, prompts.max_objects, prompts.conf) for label in engine.resolve(prompts.detect)),
        *(Point(label, prompts.max_objects, prompts.conf) for label in engine.resolve(prompts.point)),
        *(Query(question) for question in prompts.query),
    ]


def prompts_of(tasks: Iterable[Task]) -> Prompts:
    """What is asked, as a configuration says it: the opposite of `tasks_for`."""
    asked: dict[str, Any] = {}
    for task in tasks:
        if isinstance(task, Detect | Point):
            asked.setdefault("detect" if isinstance(task, Detect) else "point", []).append(task.label)
            asked["conf"], asked["max_objects"] = task.conf, task.max_objects
        elif isinstance(task, Query):
            asked.setdefault("query", []).append(task.question)
    return Prompts.model_construct(**asked)


def change_prompts(run: Run, engine: Engine, wanted: Prompts) -> None:
    """Have `run` look for what `wanted` says, from the next frame on; what it leaves out stays as it is.

    Raises:
        ConfigError: if nothing would be looked for, or the model has not learned to do it.
        UnknownClassError: if the model does not know a name.
    """
    changed = {key: getattr(wanted, key) for key in wanted.model_fields_set}
    prompts = prompts_of(run.tasks).model_copy(update=changed)
    if prompts.nothing:
        raise ConfigError(prompts.nothing)
    run.tasks = tasks_for(engine, prompts)


def add(
    streams: Streams,
    name: str,
    config: StreamConfig,
    source: Source,
    tasks: Sequence[Task],
    outputs: Sequence[Output] | Callable[[], Sequence[Output]],
) -> Run:
    """Add a stream, opened as its configuration says, to those that run; `outputs` as in `Streams.add`.

    Raises:
        StreamError: if its name is taken, or too many run.
    """
    return streams.add(
        name,
        source,
        tasks,
        outputs=outputs,
        tiles=config.tiles,
        queue=QueuePolicy.parse(config.queue) if config.queue else None,
        in_flight=config.in_flight,
    )


def begin(streams: Streams, config: StreamConfig, outputs_of: OutputsOf = lambda name, source: []) -> Run:
    """Open a stream and add it to those that run.

    Args:
        streams: those that run.
        config: what to begin.
        outputs_of: opens the outputs of its own, given its name and its source.

    Raises:
        ConfigError, SourceError, EngineError, SinkError: if something it names cannot be used.
        StreamError: if its name is taken, or too many run.
    """
    with ExitStack() as on_failure:
        source = on_failure.enter_context(source_of(config))
        tasks = tasks_for(streams.engine, config)

        def opened(name: str) -> list[Output]:
            outputs = outputs_of(name, source)
            for output in outputs:
                on_failure.callback(output.sink.close)
            return outputs

        while True:
            name = config.name or free_name(source.name, streams.names)
            try:
                run = add(streams, name, config, source, tasks, partial(opened, name))
            except StreamError:
                if config.name or name not in streams.names:
                    raise  # else another stream took it meanwhile, and the next one will do
            else:
                break
        on_failure.pop_all()
    return run
