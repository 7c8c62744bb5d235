"""A worker: an engine, its streams, and an HTTP server for the supervisor alone, in the process of a Ray actor.

It does what commands say, and tells the rest by messages: `protocol`. Knows nothing of Ray and of other workers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.pipeline.server.serve import serve

from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.load import Load
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.source_policy import SourcePolicy
from saccade.pipeline.control.state import plain
from saccade.pipeline.errors import one_line
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.record import read_event
from saccade.pipeline.events.stage import event_stage
from saccade.pipeline.events.storage.recorder import MediaWriter
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.stream import EventPlaces
from saccade.pipeline.runtime.streams import Streams, status_of
from saccade.pipeline.runtime.targets import Target
from saccade.pipeline.workers.auth import FrontAuth
from saccade.pipeline.workers.kept_files import keep_outputs
from saccade.pipeline.workers.memory import rss_bytes
from saccade.pipeline.workers.placement import demand
from saccade.pipeline.workers.protocol import Message, StreamReport, WorkerReport
from saccade.pipeline.workers.results import RelaySink
from saccade.pipeline.workers.snapshot_api import SnapshotApi
from saccade.sinks.video.broadcast import BroadcastSink

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

REPORT_S = 1.0
_POLL_S = 0.1
_ENGINE_S = 1.5  # for the engine to finish what it has, at the end
_HANGS_S = 120.0  # without Python running, after which the process ends: a library that never returns keeps the lock


class _Warnings(logging.Handler):
    """Sends warnings and worse to the supervisor."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"is": "warning", "line": one_line(record.getMessage())})


class WorkerRun:
    """A worker from `start` to its end. Methods are callable from any thread.

    Args:
        settings: `config`, the values of a `RunConfig` without streams; `index` of the worker and `threads` of its
            engine on a CPU, 0 for those of the machine; `secret` of its HTTP server; `media`, the folder of the files
            of events, or None; `machine` and `store`, as in the message `ready`, where its machine stores its events;
            `open_by_default`, as in `SourcePolicy`; `host`, the address of its HTTP server if it is not 127.0.0.1.
        send: takes each message to the supervisor, in order; the last one is `ended`.
        results: takes each result for the outputs that all streams share, pickled; may wait. None for nowhere.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        send: Callable[[Message], None],
        results: Callable[[bytes], None] | None = None,
    ) -> None:
        self._settings = settings
        self._tell = send
        self._results = results
        self._stopping = threading.Event()
        self._report_now = threading.Event()
        self._controller: Controller | None = None
        self._url = ""
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[Run, int]] = {}  # with the key of their opening
        self._sent: dict[str, Any] = {}  # the configuration of each stream as it was reported
        self._counted: dict[str, tuple[int, int]] = {}  # frames of each stream, processed and lost, as last reported
        self._work = {"open": self._open_stream, "close": self._close_stream}
        self._engines: list[Engine] = []
        self._load = Load()
        self._thread = threading.Thread(target=self._run, name="saccade worker", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def do(self, command: Message) -> None:
        """Do what a command says; returns at once."""
        if command["do"] == "stop":
            self._stopping.set()
        elif command["do"] == "report":
            self._report_now.set()
        elif work := self._work.get(command["do"]):
            # A thread each: one that waits for a camera or a disk must not keep the others waiting.
            name = f"saccade {command['do']}"
            threading.Thread(target=work, args=(command,), name=name, daemon=True).start()

    def _run(self) -> None:
        warnings = _Warnings(self._tell)
        logging.getLogger("saccade").addHandler(warnings)
        reason = "it was stopped"
        try:
            with ExitStack() as stack:
                self._controller = self._open(stack)
                stored = {key: self._settings[key] for key in ("machine", "store") if key in self._settings}
                self._tell({"is": "ready", "url": self._url, "pid": os.getpid(), **stored})
                reported_at = 0.0
                while not self._stopping.wait(_POLL_S):
                    faulthandler.dump_traceback_later(_HANGS_S, exit=True)
                    self._note_ended()
                    if self._report_now.is_set() or time.monotonic() >= reported_at + REPORT_S:
                        self._report_now.clear()
                        reported_at = time.monotonic()
                        self._tell(self._report().to_message())
                faulthandler.cancel_dump_traceback_later()
                self._end_streams(self._controller.streams)
        except Exception as error:
            reason = one_line(str(error)) or type(error).__name__
            self._tell({"is": "failed", "kind": type(error).__name__, "error": reason})
            if os.environ.get("SACCADE_DEBUG") == "1":
                log.exception("the worker failed")
        finally:
            logging.getLogger("saccade").removeHandler(warnings)
            self._engines.clear()
            self._controller = None
            self._tell({"is": "ended", "reason": reason})

    def _open(self, stack: ExitStack) -> Controller:
        config = RunConfig.model_validate(self._settings["config"])
        device = config.device
        if threads := self._settings["threads"]:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is loaded
        import torch

        if threads:
            torch.set_num_threads(threads)  # where it is loaded already
        device = device_of(device, self._settings["index"], torch.cuda.device_count())
        from saccade.pipeline.runtime.stream import load_engine

        engine = stack.enter_context(load_engine(config.model_copy(update={"device": device})))
        ask = stack.enter_context(load_engine(config.ask)) if config.ask else None
        self._engines = [one for one in (engine, ask) if one is not None]
        events = EventHub()
        events.add(lambda record: self._tell({"is": "event", "record": dict(record)}), history=True)
        media = None
        if folder := self._settings["media"]:
            media = MediaWriter(Path(folder), events.publish)
        videos = BroadcastSink()
        outputs = [Output(videos, NEWEST, viewing=True)]
        if self._results is not None:
            outputs.append(Output(RelaySink(self._results)))
        each = [Target(text) for text in config.sinks]
        policy = SourcePolicy(config.allow_sources, open_by_default=self._settings["open_by_default"])
        places = EventPlaces(events, history=media is not None, media=media)
        local = Local(Streams(engine, outputs), each=each, events=places, ask=ask, policy=policy, videos=videos)
        stack.callback(local.close)
        controller = Controller(local)
        server = serve(
            controller,
            (self._settings.get("host", "127.0.0.1"), 0),
            access=FrontAuth(self._settings["secret"]),
            routes=SnapshotApi(ask or engine, Path(folder)).routes() if folder else (),
        )
        stack.callback(server.close)
        self._url = server.url
        return controller

    # ---- commands

    def _open_stream(self, message: Message) -> None:
        try:
            while self._controller is None:
                time.sleep(_POLL_S)  # the supervisor waits for `ready`, so this is for others
            config = ListedStream.model_validate({**message["config"], "name": message["stream"]})
            if message.get("again"):
                each = [Target(text) for text in self._settings["config"].get("sinks", [])]
                keep_outputs(config.name or "", config, each)
            with self._controller.local.open(config, checked=bool(message.get("checked"))) as stream:
                # With the events that went on where it ran last.
                stream.resume(read_event(record) for record in message.get("events", ()))
                self._opened(message, self._controller.attach(stream))
        except Exception as error:
            reason = one_line(str(error) or type(error).__name__)
            answer = {"is": "refused", "stream": message["stream"], "key": message["key"]}
            self._tell({**answer, "kind": _kind_of(error), "error": reason})

    def _opened(self, message: Message, run: Run) -> None:
        name, key = message["stream"], message["key"]
        with self._lock:  # so that neither its end is reported before, nor a command to close it is done before
            self._tell({"is": "opened", "stream": name, "key": key, "live": run.source.info.live})
            self._runs[name] = run, key
            self._sent[name] = _plain(run)

    def _close_stream(self, message: Message) -> None:
        name, key, error = message["stream"], message["key"], None
        with self._lock:
            run, opened = self._runs.get(name, (None, key))
            if opened == key:
                self._runs.pop(name, None)
        if opened == key:
            if message.get("moves") and run is not None and (stage := event_stage(run.stages)) is not None:
                stage.moves = True
            error = self._remove(name)
            self._flush_events()
        self._tell({"is": "closed", "stream": name, "key": key, "error": error})

    def _remove(self, name: str) -> str | None:
        """End a stream; returns why it has not."""
        try:
            assert self._controller is not None
            self._controller.remove(name)
        except Exception as error:
            if self._controller is not None and name in self._controller.streams.names:
                return one_line(str(error))
        return None

    # ---- reports

    def _note_ended(self) -> None:
        with self._lock:
            ended = [(name, run, key) for name, (run, key) in self._runs.items() if run.ended]
            for name, _, _ in ended:
                del self._runs[name]
        for name, run, key in ended:
            self._flush_events()
            report = run.report()
            self._tell(
                {
                    "is": "gone",
                    "stream": name,
                    "key": key,
                    "error": one_line(str(run.error)) if run.error else None,
                    "live": run.source.info.live,
                    "frames": report.frames,
                    "objects": report.objects,
                    "elapsed_s": report.elapsed_s,
                    "latency": asdict(report.latency),
                    "drops": report.drops,
                    "corrupt_packets": report.corrupt_packets,
                }
            )

    def _flush_events(self) -> None:
        assert self._controller is not None
        self._controller.local.events.hub.flush()  # so that the supervisor has a stream's events before its end

    def _report(self) -> WorkerReport:
        busy_s = max((engine.counters()["busy_seconds_total"] for engine in self._engines), default=0.0)
        busy = self._load.share(busy_s, time.monotonic())
        with self._lock:
            runs = {name: run for name, (run, _) in self._runs.items()}
        statuses = {name: status_of(run) for name, run in runs.items()}
        work, wanted = {}, {}
        for name, status in statuses.items():
            counted = status.report.frames, status.report.drops.get("full", 0)
            done, lost = (new - old for new, old in zip(counted, self._counted.get(name, (0, 0)), strict=True))
            self._counted[name] = counted
            work[name] = done * max(0.1, status.report.model_ms)
            wanted[name] = demand(work[name], done, lost)
        total = sum(work.values()) or 1.0
        self._counted = {name: counted for name, counted in self._counted.items() if name in statuses}
        streams = []
        for name, status in statuses.items():
            settings = None
            with contextlib.suppress(Exception):
                values = _plain(runs[name])
                settings = values if values != self._sent.get(name) else None
                self._sent[name] = values
            report, stage = status.report, event_stage(runs[name].stages)
            cost = round(busy * wanted[name] / total, 4) if report.frames else None
            how = name, status.state, status.reason, status.live, report.frames, round(report.recent.fps, 2)
            streams.append(StreamReport(*how, cost, settings, stage.seen if stage else {}))
        return WorkerReport(round(busy, 4), rss_bytes(os.getpid()), tuple(streams))

    def _end_streams(self, streams: Streams) -> None:
        """Finish what the engine has, but not for long; closing the streams then closes the files."""
        runs = streams.stop()
        deadline = time.monotonic() + _ENGINE_S
        for run in runs:
            run.join(max(0.0, deadline - time.monotonic()))
        streams.abandon()


def device_of(device: str, index: int, gpus: int) -> str:
    """The device of the worker of that index: where the GPU is left open, one GPU after the other.

    Args:
        device: as configured.
        index: of the worker, from 0.
        gpus: how many GPUs there are.
    """
    return f"cuda:{index % gpus}" if device in ("auto", "cuda") and gpus else device


def _kind_of(error: Exception) -> str:
    """The name of the error, or of the class that it is derived from and the HTTP API knows."""
    known = ("NotAllowedError", "StreamError", "ConfigError", "SourceError", "EngineError", "SinkError")
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((name for name in known if name in names), names[0])


def _plain(run: Run) -> dict[str, Any]:
    return {} if run.config is None else plain(run.config)
