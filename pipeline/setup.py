"""Opens what a configuration names, in an order in which a mistake costs little time and leaves no file behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.tasks import Detect, Point, Query, Task
from pipeline.config import ConfigError, RunConfig
from pipeline.queue import NEWEST, WAIT, QueuePolicy
from pipeline.run import Output, Run
from sinks import DisplaySink, JsonlSink, Sink, open_sink
from sources import Source, open_source

if TYPE_CHECKING:
    from engine import Engine


@contextmanager
def opened_run(config: RunConfig) -> Iterator[Run]:
    """Open source, model and sinks; yield the run, not yet started; close the model in the end.

    Raises:
        ConfigError: if the outputs would overwrite each other or the source, or nothing is asked for.
        SourceError, EngineError, SinkError: if one of them cannot be used.
    """
    check_outputs(config)
    with (
        open_source(
            config.source,
            vid_stride=config.vid_stride,
            start=config.start,
            end=config.end,
            hwaccel=config.hwaccel,
            rtsp_transport=config.rtsp_transport,
        ) as source,
        load_engine(config) as engine,
    ):
        tasks = tasks_for(engine, config)
        outputs = _open_sinks(config, source)
        queue = QueuePolicy.parse(config.queue) if config.queue else NEWEST if source.info.live else WAIT
        yield Run(source, engine, tasks, outputs, tiles=config.tiles, queue=queue, in_flight=config.in_flight)


def load_engine(config: RunConfig) -> Engine:
    """Load the model that the configuration names, onto the device that it names.

    Raises:
        EngineError: if there is no such model or device.
    """
    from engine import Engine  # brings torch, which takes seconds: whatever is wrong before this is told at once

    return Engine.load(config.model, device=config.device)


def tasks_for(engine: Engine, config: RunConfig) -> list[Task]:
    """What the configuration asks of each picture, in the model's own names.

    Raises:
        UnknownClassError: if the model does not know a name.
        ConfigError: if the model has not learned to do what is asked.
    """
    for skill in ("detect", "point", "query"):
        if getattr(config, skill) and skill not in engine.model.skills:
            raise ConfigError(f"{engine.model.name} can {' and '.join(engine.model.skills)}, not {skill}")
    return [
        *(Detect(label, config.max_objects, config.conf) for label in engine.resolve(config.detect)),
        *(Point(label, config.max_objects, config.conf) for label in engine.resolve(config.point)),
        *(Query(question) for question in config.query),
    ]


def check_outputs(config: RunConfig) -> None:
    """Refuse outputs that would overwrite the source or each other.

    Raises:
        ConfigError: if they would.
    """
    source = Path(config.source)
    files = {f"--{name}": Path(value) for name, value in (("out", config.out), ("jsonl", config.jsonl)) if value}
    for flag, path in files.items():
        if path.exists() and source.exists() and path.samefile(source):
            raise ConfigError(f"{flag}: {path} is the source itself")
    if len({path.resolve() for path in files.values()}) < len(files):
        raise ConfigError(f"--out and --jsonl are the same file, {config.out}")


def _open_sinks(config: RunConfig, source: Source) -> list[Output]:
    """Open the sinks; should one fail, close those already open, which then leave nothing behind."""
    outputs: list[Output] = []
    with ExitStack() as on_failure:

        def add(sink: Sink, outbox: QueuePolicy = WAIT) -> None:
            on_failure.callback(sink.close)
            outputs.append(Output(sink, outbox))

        if config.display:
            add(DisplaySink(), NEWEST)  # a window shows what is newest, and must not hold back what is written
        if config.out:
            rate = source.info.average_rate
            add(
                open_sink(
                    config.out,
                    rate=rate / config.vid_stride if rate else None,
                    audio_from=config.source if source.info.audio else None,
                )
            )
        if config.jsonl:
            add(JsonlSink(config.jsonl))  # last, because to open it is to empty the file that was there
        on_failure.pop_all()
    return outputs
