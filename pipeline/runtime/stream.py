"""Builds what a configuration names: the model, and streams that are open and ready to start.

`open_stream` is the one way to open a stream, for a session, the HTTP API and the demo. Knows nothing of servers,
terminals or addresses of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast, get_args

from saccade.engine.tasks.task import Task
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.heatmap import HeatmapStage
from saccade.pipeline.analytics.motion import MotionGate
from saccade.pipeline.analytics.stages import GATES, STAGES, ClosableStage, Gate, Stage
from saccade.pipeline.config import RunConfig, StreamConfig
from saccade.pipeline.config.queue_policy import QueuePolicy
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.machine import GAP_S
from saccade.pipeline.events.record import Event
from saccade.pipeline.events.settings import AskSettings
from saccade.pipeline.events.stage import EventStage, event_stage
from saccade.pipeline.events.storage.recorder import MediaWriter, Recorder
from saccade.pipeline.runtime.engine_stream import Share
from saccade.pipeline.runtime.held_frames import HeldFrames
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.streams import Streams
from saccade.pipeline.runtime.tasks import names_of, set_asker, tasks_for
from saccade.sources import FileSource, HwAccel, LiveSource, Source, Transport, open_source
from saccade.sources.network.dialer import CheckAddress
from saccade.sources.replay import ReplaySource

if TYPE_CHECKING:
    from saccade.engine import Engine


class OpenedStream:
    """A stream that is open and has not started: its source, stages, gates and outputs, and what to find in it.

    A block of it closes everything, unless the stream was started there. Made by `open_stream`.

    Attributes:
        config: what it was opened from.
        source: where its frames come from.
        tasks: what to find in each frame; empty before `resolve_tasks`.
        outputs: where only its results go; empty at first.
        held: its frames, if its source runs already; None if it does not.
    """

    def __init__(self, config: StreamConfig, source: Source, stages: list[Stage], gates: list[Gate]) -> None:
        self.config = config
        self.source = source
        self.tasks: list[Task] = []
        self.outputs: list[Output] = []
        self._stages = stages
        self._gates = gates
        self._open = True
        self.held: HeldFrames | None = None
        self.on_end: list[Callable[[], None]] = []
        """Called when its run has ended, or it was closed without one."""

    def resolve_tasks(self, engine: Engine, ask: Engine | None = None) -> None:
        """Set `tasks` to what the configuration asks for, in the model's own names, which rules learn as well.

        What rules ask is asked of `ask`, or else of the engine itself.

        Raises:
            UnknownClassError, ConfigError: as `tasks_for`.
        """
        self.tasks = tasks_for(engine, self.config)
        self.source.gpu = engine.model.gpu
        if (stage := event_stage(self._stages)) is not None:
            stage.names = partial(names_of, engine)
            set_asker(stage, ask or engine, self.config, wait=not self.source.info.live)

    def resume(self, events: Iterable[Event]) -> None:
        """Go on with the events that went on when the stream ran last, as in `EventStage.resume`."""
        if (stage := event_stage(self._stages)) is not None:
            stage.resume(events)

    def hold(self, on_frame: Callable[[], None], on_end: Callable[[Exception | None], None]) -> None:
        """Have the source run, and drop its frames until `start`; arguments as in `HeldFrames`."""
        self.held = HeldFrames(self.source, on_frame, on_end)

    def reserve(self, streams: Streams) -> AbstractContextManager[str]:
        """Hold a name for it: the one configured, or else a free one like the source's; as `Streams.reserve`."""
        return streams.reserve(self.config.name or self.source.name, or_similar=self.config.name is None)

    def start(self, streams: Streams, name: str, *, reserved: bool = True) -> Run:
        """Start it under a name that is held by `reserve`, or is not `reserved`; the run owns everything from then on.

        Raises:
            StreamError: as `Streams.add`.
        """
        config = self.config
        run = streams.add(
            name,
            self.source,
            self.tasks,
            outputs=self.outputs,
            tiles=config.tiles,
            queue=QueuePolicy.parse(config.queue) if config.queue else None,
            in_flight=config.in_flight,
            share=Share(config.weight, config.max_fps, config.deadline_ms),
            stages=self._stages,
            gates=self._gates,
            on_end=lambda run: self._ended(),
            reserved=reserved,
            frames=self.held,
        )
        run.settings = config
        self._open = False
        return run

    def close(self) -> None:
        """Close everything, unless it was started. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        with ExitStack() as everything:  # whatever one of them raises
            everything.callback(self._ended)
            everything.callback(self.source.close)
            for stage in self._stages:
                if isinstance(stage, ClosableStage):
                    everything.callback(stage.close)
            for output in self.outputs:
                everything.callback(output.sink.close)

    def _ended(self) -> None:
        for callback in self.on_end:
            callback()

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, unless it was started."""
        self.close()


def open_stream(
    config: StreamConfig,
    engine: Engine | None = None,
    *,
    repeat: bool = False,
    check: CheckAddress | None = None,
    events: EventHub | None = None,
    history: bool = False,
    media: MediaWriter | None = None,
    ask: Engine | None = None,
) -> OpenedStream:
    """Open what a stream's configuration names, but for its outputs.

    Args:
        config: the stream's.
        engine: resolves what is to be found; None if `resolve_tasks` is called later.
        repeat: play a file over and over, at its own pace, instead of once, as fast as its frames are taken.
        check: called with each live address before it is connected to, those of redirects among them; raises
            `SourceError` to refuse it.
        events: where events of the stream's rules go; None for nowhere.
        ask: answers the questions of rules; None for the engine itself.
        media: writes clips and snapshots of events; None for none.
        history: have the paths of tracks and the counts of minutes go there as well.

    Raises:
        SourceError: if the source cannot be used.
        UnknownClassError, ConfigError: as `tasks_for`.
    """
    with ExitStack() as on_failure:
        source = on_failure.enter_context(_open_source(config, check))
        if repeat and not source.info.live:
            source.close()
            source = on_failure.enter_context(ReplaySource(_open_source(config, check, paced=True)))
        motion = MotionGate(config) if "motion" in config.gates else None
        analysis = AnalyzeStage(config, motion.still_before if motion else None)
        stages: list[Stage] = [analysis]
        if config.rules:
            analysis.need_tracks()
        if events is not None:
            began = config.began.timestamp() if config.began else None
            minutes = analysis.take_minutes if history else None
            recorder = _recorder(config, source, media) if media is not None and config.clips else None
            stages.append(
                EventStage(
                    config.rules,
                    events.publish,
                    file_began=began,
                    flush=events.flush,
                    minutes=minutes,
                    recorder=recorder,
                    gap_s=max(GAP_S, 2 * config.motion_heartbeat),
                )
            )
        elif config.rules:
            raise ConfigError("there is nowhere for events to go: rules are for `saccade run`")
        stages += [HeatmapStage(config.heatmap)] if config.heatmap else []
        stages += [STAGES[name]() for name in config.stages]
        gates = [motion if motion and name == "motion" else GATES[name]() for name in config.gates]
        stream = on_failure.enter_context(OpenedStream(config, source, stages, gates))
        if engine is not None:
            stream.resolve_tasks(engine, ask)
        on_failure.pop_all()
    return stream


def _recorder(config: StreamConfig, source: Source, media: MediaWriter) -> Recorder:
    """What records the events of a stream: from its packets if it is live, from the file if it is one."""
    file = source.index if isinstance(source, FileSource) else None
    recorder = Recorder(media, before_s=config.clip_before, after_s=config.clip_after, file=file)
    if isinstance(source, LiveSource):
        source.on_packet = recorder.ring.add
    return recorder


def add_stream(
    streams: Streams, config: StreamConfig, *, repeat: bool = False, check: CheckAddress | None = None
) -> Run:
    """Open a stream and start it, with no outputs but those of every stream; `repeat`, `check` as in `open_stream`.

    Raises:
        ConfigError, SourceError, EngineError: if something it names cannot be used.
        StreamError: if its name is taken, or too many streams run.
    """
    with open_stream(config, streams.engine, repeat=repeat, check=check) as stream, stream.reserve(streams) as name:
        return stream.start(streams, name)


def _open_source(config: StreamConfig, check: CheckAddress | None, *, paced: bool = False) -> Source:
    return open_source(
        config.source,
        stream=config.name,
        vid_stride=config.vid_stride,
        start=config.start,
        end=config.end,
        hwaccel=config.hwaccel,
        rtsp_transport=config.rtsp_transport,
        loss=config.loss,
        tls=config.tls,
        check_address=check,
        paced=paced,
    )


def open_once(target: str, hwaccel: str, transport: str, tls: str = "verify") -> Source:
    """Open a source that fails at its first failure, with its code, where `saccade run` would reconnect.

    Raises:
        ConfigError: if there is no such hwaccel or transport.
        SourceError: if the target is not a source.
    """
    for flag, value, known in (("--hwaccel", hwaccel, HwAccel), ("--rtsp-transport", transport, Transport)):
        if value not in get_args(known):
            raise ConfigError(f"{flag}: should be {' or '.join(get_args(known))}, got '{value}'")
    way = cast(Transport, transport)
    return open_source(target, hwaccel=cast(HwAccel, hwaccel), rtsp_transport=way, tls=tls, retry=False)


def load_engine(config: RunConfig | AskSettings, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Load the model that the configuration names, onto the device and in the dtypes that it names.

    Args:
        config: names them, for frames or for questions.
        progress: called with (done, all) while a GPU is prepared; None to ignore it.

    Raises:
        EngineError: if there is no such model or device.
    """
    # Only now: it brings torch, which takes seconds, and whatever is wrong before this is reported at once.
    from saccade.engine import Engine

    imgsz = config.imgsz if isinstance(config, RunConfig) else None
    return for_life(
        lambda: Engine.load(
            config.model, config.device, config.dtype, kv_dtype=config.kv_dtype, imgsz=imgsz, progress=progress
        )
    )


def for_life(load: Callable[[], Engine]) -> Engine:
    """What is loaded, as the engine of this process for all of its life: see `shorten_collections`."""
    from saccade.engine.process import shorten_collections

    shorten_collections()
    engine = load()
    if engine.model.gpu is not None:
        shorten_collections(model=True)
    return engine
