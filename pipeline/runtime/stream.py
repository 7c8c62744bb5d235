"""Opens one stream: from its configuration to a source, tasks, stages and gates that are ready to start.

`open_stream` is the one way to open a stream, for a run, the HTTP API and the demo. Knows nothing of servers, terminals
or addresses of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, cast, get_args

from saccade.engine.tasks.task import Task
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.heatmap import HeatmapStage
from saccade.pipeline.analytics.motion import FINE_ROWS, MotionGate, MotionMap
from saccade.pipeline.analytics.saccades.stage import SaccadeStage
from saccade.pipeline.analytics.stages import GATES, STAGES, ClosableStage, Gate, Stage
from saccade.pipeline.config import ListedStream, RunConfig, StreamConfig
from saccade.pipeline.config.queue_policy import QueuePolicy
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.machine import GAP_S
from saccade.pipeline.events.record import Event
from saccade.pipeline.events.settings import AskSettings
from saccade.pipeline.events.stage import EventStage, event_stage
from saccade.pipeline.events.storage.recorder import MediaWriter, Recorder
from saccade.pipeline.runtime.engine_stream import saccades_of, share_of
from saccade.pipeline.runtime.luma import FrameLuma
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.streams import Streams
from saccade.pipeline.runtime.tasks import asker_for, check_asked, names_of, tasks_for
from saccade.sinks import SinkError
from saccade.sinks.recording import PacketRecorder, RecordingPlace
from saccade.sources import FileSource, HwAccel, LiveSource, Source, Transport, open_source, redact
from saccade.sources.network.dialer import CheckAddress
from saccade.sources.replay import ReplaySource

if TYPE_CHECKING:
    from saccade.engine import Engine


@dataclass(slots=True, frozen=True)
class EventPlaces:
    """Where the events of streams go.

    Attributes:
        hub: hands them to outputs and the store.
        history: whether the paths of tracks and the counts of minutes go there as well.
        media: writes clips and snapshots; None for none.
    """

    hub: EventHub
    history: bool = False
    media: MediaWriter | None = None


class OpenedStream:
    """A stream that is open and has not started: its source, tasks, stages, gates and outputs.

    Leaving its block closes everything, unless the stream was started. Made by `open_stream`.

    Attributes:
        config: what it was opened from.
        source: where its frames come from.
        tasks: what to find in each frame.
        outputs: where only its results go; empty at first.
    """

    def __init__(
        self, config: ListedStream, source: Source, tasks: list[Task], stages: list[Stage], gates: list[Gate]
    ) -> None:
        self.config = config
        self.source = source
        self.tasks = tasks
        self.outputs: list[Output] = []
        self._stages = stages
        self._gates = gates
        self._open = True
        self.recording: PacketRecorder | None = None
        """What records its packets; closed with it."""
        self.on_end: list[Callable[[Run | None], object]] = []
        """Called with its run when that has ended, or with None when it was closed without one."""

    def resume(self, events: Iterable[Event]) -> None:
        """Go on with the events that went on when the stream ran last, as in `EventStage.resume`."""
        if (stage := event_stage(self._stages)) is not None:
            stage.resume(events)

    def start(self, streams: Streams, *, reserved: bool = False) -> Run:
        """Start it under the name of its configuration; the run owns everything from then on.

        Args:
            streams: where it runs.
            reserved: the caller holds its name by `Streams.reserve`.

        Raises:
            StreamError: as `Streams.add`.
        """
        config = self.config
        run = streams.add(
            config.name or self.source.name,
            self.source,
            self.tasks,
            outputs=self.outputs,
            tiles=config.tiles,
            queue=QueuePolicy.parse(config.queue) if config.queue else None,
            in_flight=config.in_flight,
            share=share_of(config),
            stages=self._stages,
            gates=self._gates,
            on_end=self._ended,
            reserved=reserved,
            config=config,
        )
        run.recorder = self.recording
        self._open = False
        return run

    def close(self) -> None:
        """Close everything, unless it was started. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        with ExitStack() as everything:  # whatever one of them raises
            everything.callback(self._ended, None)
            everything.callback(self.source.close)
            for stage in self._stages:
                if isinstance(stage, ClosableStage):
                    everything.callback(stage.close)
            for output in self.outputs:
                everything.callback(output.sink.close)

    def _ended(self, run: Run | None) -> None:
        for callback in self.on_end:
            callback(run)

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it, unless it was started."""
        self.close()


def open_stream(
    config: ListedStream,
    engine: Engine,
    *,
    ask: Engine | None = None,
    events: EventPlaces | None = None,
    source: Source | None = None,
    check: CheckAddress | None = None,
) -> OpenedStream:
    """Open what a stream's configuration names, but for its outputs.

    Args:
        config: the stream's.
        engine: finds what is to be found.
        ask: answers the questions of rules; None for the engine itself.
        events: where events of the stream's rules go; None for nowhere.
        source: where its frames come from, if that is open already; it is closed if this raises.
        check: as in `open_source_of`.

    Raises:
        SourceError: if the source cannot be used.
        UnknownClassError, ConfigError: as `tasks_for`, or if a rule asks what no model here can answer.
    """
    with ExitStack() as on_failure:
        source = on_failure.enter_context(source or open_source_of(config, check))
        tasks = tasks_for(engine, config)
        check_asked(ask or engine, config)
        source.gpu = engine.model.gpu
        # Where the engine is on a GPU, it takes frames as they are decoded: no image is made for motion alone.
        on_gpu = engine.model.gpu is not None
        fine = MotionMap(FINE_ROWS, FrameLuma() if on_gpu else None)
        moving = fine if config.saccades != "0" else MotionMap(read=FrameLuma() if on_gpu else None)
        motion = MotionGate(config, moving) if "motion" in config.gates else None
        saccades = SaccadeStage(
            saccades_of(config),
            engine.input_size,
            live=source.info.live,
            motion=fine,
            idle_s=lambda: engine.idle_s,
        )
        analysis = AnalyzeStage(config, motion.still_before if motion else None, track=bool(config.rules))
        stages: list[Stage] = [saccades, analysis]
        if events is not None:
            began = config.began.timestamp() if config.began else None
            stages.append(
                EventStage(
                    config.rules,
                    events.hub.publish,
                    names=partial(names_of, engine),
                    asker=asker_for(ask or engine, config, wait=not source.info.live),
                    file_began=began,
                    flush=events.hub.flush,
                    minutes=analysis.take_minutes if events.history else None,
                    recorder=_recorder(config, source, events.media) if events.media and config.clips else None,
                    gap_s=max(GAP_S, 2 * config.motion_heartbeat),
                )
            )
        elif config.rules:
            raise ConfigError("there is nowhere for events to go: rules are for `saccade run`")
        stages += [HeatmapStage(config.heatmap)] if config.heatmap else []
        stages += [STAGES[name]() for name in config.stages]
        gates = [motion if motion and name == "motion" else GATES[name]() for name in config.gates]
        recording = _recording(config, source)
        on_failure.pop_all()
    opened = OpenedStream(config, source, tasks, stages, gates)
    if recording is not None:
        opened.recording = recording
        opened.on_end.append(lambda _: recording.close())
    return opened


def _recording(config: StreamConfig, source: Source) -> PacketRecorder | None:
    """What records the packets of a stream, if that is wanted."""
    if config.record is None:
        return None
    if not isinstance(source, LiveSource):
        shown = redact(config.source)
        raise ConfigError(f"record: {shown} is not live: only cameras and other live sources are recorded")
    name = config.name or source.name
    try:
        recorder = PacketRecorder(name, RecordingPlace.parse(config.record, name))
    except SinkError as error:
        raise ConfigError(str(error)) from None
    source.taps.video.append(recorder.take)
    source.taps.sound.append(recorder.take)
    return recorder


def _recorder(config: StreamConfig, source: Source, media: MediaWriter) -> Recorder:
    """What records the events of a stream: from its packets if it is live, from the file if it is one."""
    file = source.index if isinstance(source, FileSource) else None
    recorder = Recorder(media, before_s=config.clip_before, after_s=config.clip_after, file=file)
    if isinstance(source, LiveSource):
        source.taps.video.append(recorder.ring.add)
    return recorder


def open_source_of(config: StreamConfig, check: CheckAddress | None = None) -> Source:
    """Open the source of a stream; a file plays as a camera where the configuration says so.

    Args:
        config: the stream's.
        check: refuses addresses.

    Raises:
        SourceError: if it cannot be used.
    """
    source = open_source(
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
        paced=config.loop or config.realtime,
    )
    if source.info.live or not (config.loop or config.realtime):
        return source
    return ReplaySource(source, loop=config.loop)


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
            config.model,
            config.device,
            config.dtype,
            kv_dtype=config.kv_dtype,
            imgsz=imgsz,
            refiner=config.refiner,
            progress=progress,
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
