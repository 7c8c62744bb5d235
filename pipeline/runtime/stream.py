"""Opens one stream: creates its source, tasks, stages and gates from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self, cast, get_args

from saccade.engine.tasks.task import Task
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.heatmap import HeatmapStage
from saccade.pipeline.analytics.motion import FINE_ROWS, CameraGate, MotionGate, MotionMap
from saccade.pipeline.analytics.saccades.stage import SaccadeStage
from saccade.pipeline.analytics.stages import GATES, STAGES, ClosableStage, Gate, Stage, find_stage
from saccade.pipeline.config import ListedStream, RunConfig, StreamConfig
from saccade.pipeline.config.queue_policy import QueuePolicy
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.machine import GAP_S
from saccade.pipeline.events.record import Event
from saccade.pipeline.events.settings import AskSettings
from saccade.pipeline.events.stage import EventStage
from saccade.pipeline.events.storage.recorder import MediaWriter, Recorder
from saccade.pipeline.events.verdicts import Verdict, VerdictStage
from saccade.pipeline.runtime.engine_stream import saccades_of
from saccade.pipeline.runtime.luma import FrameLuma
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.record_source import RecordSource
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.streams import Streams
from saccade.pipeline.runtime.tasks import asker_for, check_asked, names_of, tasks_for
from saccade.pipeline.settings import is_onvif
from saccade.sinks import SinkError
from saccade.sinks.recording import PacketRecorder, RecordingPlace
from saccade.sources import FileSource, HwAccel, LiveSource, Source, SourceError, Transport, open_source, redact
from saccade.sources.network.dialer import CheckAddress
from saccade.sources.onvif import OnvifAddress, OnvifSource
from saccade.sources.replay import ReplaySource

if TYPE_CHECKING:
    from saccade.engine import Engine


@dataclass(slots=True, frozen=True)
class EventPlaces:
    """The receivers of a stream's events.

    Attributes:
        hub: passes events to the outputs and the event store.
        history: whether track paths and object counts per minute are also stored.
        media: writes clips and snapshots, or None.
        verdicts: known false alarms, by stream. Similar detections are suppressed.
    """

    hub: EventHub
    history: bool = False
    media: MediaWriter | None = None
    verdicts: dict[str, Sequence[Verdict]] = field(default_factory=dict)


class OpenedStream:
    """A stream that `open_stream` has opened, but that has not been started.

    Leaving the `with` block closes the stream, unless it was started.

    Attributes:
        config: configuration of the stream.
        source: source of the frames.
        tasks: tasks for each frame.
        outputs: outputs that only this stream uses; initially empty.
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
        """The recorder of the source's packets; closed with the stream."""
        self.record_source: RecordSource | None = None
        """The camera's second stream; closed with the stream."""
        self.on_end: list[Callable[[Run | None], object]] = []
        """Called when the stream ends, with its run, or with None if the stream was never started."""

    def resume(self, events: Iterable[Event]) -> None:
        """Continue rule events that were open when the stream was stopped."""
        if (stage := find_stage(self._stages, EventStage)) is not None:
            stage.resume(events)

    def start(self, streams: Streams, *, reserved: bool = False) -> Run:
        """Start the stream. Return its run, which closes source, stages and outputs at its end.

        Args:
            streams: the running streams, to which this stream is added.
            reserved: whether the caller has reserved the name with `Streams.reserve`.

        Raises:
            StreamError: if the name is in use, or too many streams are running.
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
            share=config,
            stages=self._stages,
            gates=self._gates,
            on_end=self._ended,
            reserved=reserved,
            config=config,
        )
        run.recorder = self.recording
        self._open = False
        if self.record_source is not None:
            self.record_source.start()
        return run

    def close(self) -> None:
        """Close the source, stages and outputs, unless the stream was started. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        with ExitStack() as everything:  # closes all, even if one raises an error
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
        return self

    def __exit__(self, *_: object) -> None:
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
    """Open a stream from its configuration, without its outputs.

    Args:
        config: configuration of the stream.
        engine: engine for frames.
        ask: engine that answers the questions of rules; None uses `engine`.
        events: receivers of events, or None.
        source: a source that is already open. It is closed if an error occurs.
        check: checks the source's addresses, see `open_source_of`.

    Raises:
        SourceError: if the source cannot be used.
        UnknownClassError: if the model does not know a label.
        ConfigError: if a prompt, a gate or a question of a rule is not supported.
    """
    with ExitStack() as on_failure:
        source = on_failure.enter_context(source or open_source_of(config, check))
        clips = events.media if events is not None and config.clips and config.rules else None
        second = _record_source_of(config, source.name, check) if config.record or clips else None
        recorded = source if second is None else second
        tasks = tasks_for(engine, config)
        check_asked(ask or engine, config)
        source.gpu = engine.model.gpu
        # A GPU engine accepts frames in the decoder's format, so motion detection must not cause an RGB conversion.
        on_gpu = engine.model.gpu is not None
        fine = MotionMap(FINE_ROWS, FrameLuma() if on_gpu else None)
        moving = fine if config.saccades != "0" else MotionMap(read=FrameLuma() if on_gpu else None)
        signals = source.signals if isinstance(source, OnvifSource) else None
        if "camera" in config.gates and signals is None and source.info.live:
            raise ConfigError("gates: the gate 'camera' needs an ONVIF source, onvif://user:password@HOST")
        motion = MotionGate(config, moving) if "motion" in config.gates else None
        camera = CameraGate(config, signals) if "camera" in config.gates and signals else None
        saccades = SaccadeStage(
            saccades_of(config),
            engine.input_size,
            live=source.info.live,
            motion=fine,
            idle_s=lambda: engine.idle_s,
        )
        still = motion or camera
        analysis = AnalyzeStage(config, still.still_before if still else None, track=bool(config.rules))
        look = engine.look if engine.has_looks and events is not None and events.history else None
        stages: list[Stage] = [saccades, VerdictStage(look, events.verdicts if events is not None else {}), analysis]
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
                    recorder=_recorder(config, recorded, events.media, second is not None)
                    if events.media and config.clips
                    else None,
                    gap_s=max(GAP_S, 2 * config.motion_heartbeat),
                    look=look,
                    signals=signals,
                )
            )
        elif config.rules:
            raise ConfigError("event rules need `saccade run`: use that command, or remove the rules")
        stages += [HeatmapStage(config.heatmap)] if config.heatmap else []
        stages += [STAGES[name]() for name in config.stages]
        own = {"motion": motion, "camera": camera}
        gates = [own.get(name) or GATES[name]() for name in config.gates]
        recording = _recording(config, recorded)
        on_failure.pop_all()
    opened = OpenedStream(config, source, tasks, stages, gates)
    if second is not None:
        opened.record_source = received = RecordSource(second)
        opened.on_end.append(lambda _: received.close())
    if recording is not None:
        opened.recording = recording
        opened.on_end.append(lambda _: recording.close())
    return opened


def _recording(config: StreamConfig, source: Source) -> PacketRecorder | None:
    """Return the recorder that stores the packets of a stream. Return None if recording is off."""
    if config.record is None:
        return None
    if not isinstance(source, LiveSource):
        shown = redact(config.source)
        raise ConfigError(
            f"record: {shown} is not live, and only live sources can be recorded; to test recording, start a second "
            "Saccade process that plays the file with --loop, and use its live video as the source here: "
            "http://HOST:PORT/streams/NAME/live.mp4?overlay=off"
        )
    name = config.name or source.name
    try:
        recorder = PacketRecorder(name, RecordingPlace.parse(config.record, name))
    except SinkError as error:
        raise ConfigError(str(error)) from None
    source.taps.video.append(recorder.take)
    source.taps.sound.append(recorder.take)
    return recorder


def _record_source_of(config: StreamConfig, name: str, check: CheckAddress | None) -> LiveSource | None:
    """Open a camera's second, higher-resolution stream for recordings. Return None if it is not configured."""
    address = _record_address(config)
    if address is None:
        return None
    wrong = f"record_source: {redact(address)} should be the address of a camera, such as rtsp://HOST/main"
    if address.startswith("webrtc:"):
        raise ConfigError(wrong)
    try:
        source = open_source(
            address,
            stream=f"{name} (record source)",
            hwaccel="none",
            rtsp_transport=config.rtsp_transport,
            tls=config.tls,
            check_address=check,
            largest=True,
        )
    except SourceError as error:
        raise ConfigError(f"record_source: {error}") from None
    if not isinstance(source, LiveSource):
        source.close()
        raise ConfigError(wrong)
    return source


def _record_address(config: StreamConfig) -> str | None:
    """Return the URL of the camera's second stream, or None if only one stream is used."""
    if config.record_source is None and is_onvif(config.source):
        return None if OnvifAddress.parse(config.source).token else config.source
    return config.record_source


def _recorder(config: StreamConfig, source: Source, media: MediaWriter, second: bool) -> Recorder:
    """Return the recorder of clips and snapshots.

    Clips are cut from the packets of a live source, or from the source file.
    """
    file = source.index if isinstance(source, FileSource) else None
    recorder = Recorder(media, before_s=config.clip_before, after_s=config.clip_after, file=file, second=second)
    if isinstance(source, LiveSource):
        source.taps.video.append(recorder.ring.add)
    return recorder


def open_source_of(config: StreamConfig, check: CheckAddress | None = None) -> Source:
    """Open the source of a stream. With `realtime` or `loop`, a file is played as a live stream.

    Args:
        config: configuration of the stream.
        check: called with the resolved addresses; raises an error for a forbidden address.

    Raises:
        SourceError: if the source cannot be used.
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
    """Open a source that does not reconnect after an error.

    Raises:
        ConfigError: if `hwaccel` or `transport` is not a valid value.
        SourceError: if the target is not a source.
    """
    for flag, value, known in (("--hwaccel", hwaccel, HwAccel), ("--rtsp-transport", transport, Transport)):
        if value not in get_args(known):
            raise ConfigError(f"{flag}: should be {' or '.join(get_args(known))}, got '{value}'")
    way = cast(Transport, transport)
    return open_source(target, hwaccel=cast(HwAccel, hwaccel), rtsp_transport=way, tls=tls, retry=False)


def load_engine(config: RunConfig | AskSettings, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Load the configured model on the configured device, with the configured dtypes.

    Args:
        config: configuration of the model for frames or for questions.
        progress: progress callback (steps done, total steps) for the preparation of a GPU, or None.

    Raises:
        EngineError: if the model or device does not exist.
    """
    # Imported late: torch takes seconds to import, and earlier errors are reported at once.
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
    """Load an engine that is used until the process ends."""
    from saccade.engine.process import shorten_collections

    shorten_collections()
    engine = load()
    if engine.model.gpu is not None:
        shorten_collections(model=True)
    return engine
