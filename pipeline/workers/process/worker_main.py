"""What runs in a worker's process: an engine, its streams and an HTTP server for the supervisor alone.

It does what comes through its control connection, and ends, with every file closed, when that is closed: so none
outlives its supervisor. Knows nothing of other workers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.control.controller import Controller
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
from saccade.pipeline.runtime.stream import EventPlaces, OpenedStream
from saccade.pipeline.runtime.streams import Streams, status_of
from saccade.pipeline.runtime.targets import Target
from saccade.pipeline.server.serve import serve
from saccade.pipeline.workers.auth import FrontAuth
from saccade.pipeline.workers.placement import demand
from saccade.pipeline.workers.process.channel import Channel
from saccade.pipeline.workers.process.held_streams import HeldStreams
from saccade.pipeline.workers.process.kept_files import keep_outputs
from saccade.pipeline.workers.process.memory import rss_bytes
from saccade.pipeline.workers.process.results import RelaySink
from saccade.pipeline.workers.process.snapshot_api import SnapshotApi
from saccade.pipeline.workers.protocol import Message, StreamReport, WorkerReport
from saccade.sinks.video.broadcast import BroadcastSink

log = logging.getLogger(__name__)

REPORT_S = 1.0
_POLL_S = 0.1
_LEAVE_S = 15.0  # for a stream that moves to have everything written
_ENGINE_S = 1.5  # for the engine to finish what it has, at the end
_LIMIT_S = 4.0  # from the command to stop to the end of the process, whatever hangs
_HANGS_S = 120.0  # without Python running, after which the process ends: a library that never returns keeps the lock


def run_worker(settings: str, control: Connection, results: Connection | None) -> None:
    """Run a worker to its end.

    Args:
        settings: as JSON: `config`, the values of a `RunConfig` without streams; `index` of the worker and `threads`
            of its engine on a CPU, 0 for those of the machine; `secret` of its HTTP server; `media`, the folder of the
            files of events, or None; `machine` and `store`, as in the message `ready`, where its machine stores its
            events; `open_by_default`, as in `SourcePolicy`;
            `processors`, its share of those of the machine; `host`, the address of its HTTP server if it is not
            127.0.0.1.
        control: to the supervisor.
        results: where what streams find goes as well; None for nowhere.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the supervisor, too, which decides
    with contextlib.suppress(AttributeError):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    worker = _WorkerProcess(json.loads(settings), Channel(control), results)
    signal.signal(signal.SIGTERM, lambda number, frame: worker.stop())
    code = worker.run()
    sys.stdout.flush()
    os._exit(code)  # without waiting for what hangs in other threads


class _Warnings(logging.Handler):
    """Sends warnings and worse to the supervisor."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send({"is": "warning", "line": one_line(record.getMessage())})


class _WorkerProcess:
    def __init__(self, settings: Mapping[str, Any], channel: Channel, results: Connection | None) -> None:
        self._settings = settings
        self._channel = channel
        self._results = results
        self._stopping = threading.Event()
        self._report_now = threading.Event()
        self._controller: Controller | None = None
        self._url = ""
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[Run, int]] = {}  # with the key of their opening
        self._sent: dict[str, Any] = {}  # the configuration of each stream as it was reported
        self._counted: dict[str, tuple[int, int]] = {}  # frames of each stream, processed and lost, as last reported
        self._leaving: dict[str, Run] = {}  # the newest run of each that has moved: its source may still be closing
        self._held = HeldStreams(self._send)
        self._work = {"open": self._open_stream, "begin": self._begin_stream, "close": self._close_stream}
        self._usage = _usage()

    def stop(self) -> None:
        """Ask for the end; may be called by a signal handler."""
        self._stopping.set()

    def run(self) -> int:
        """Work until the supervisor says stop, or is gone; returns the exit code."""
        logging.getLogger().addHandler(_Warnings(self._channel))
        threading.Thread(target=self._receive, name="saccade control", daemon=True).start()
        try:
            with ExitStack() as stack:
                self._controller = self._open(stack)
                self._usage = _usage()
                stored = {key: self._settings[key] for key in ("machine", "store") if key in self._settings}
                self._channel.send({"is": "ready", "url": self._url, "pid": os.getpid(), **stored})
                reported_at = 0.0
                while not self._stopping.wait(_POLL_S):
                    faulthandler.dump_traceback_later(_HANGS_S, exit=True)
                    self._note_ended()
                    if self._report_now.is_set() or time.monotonic() >= reported_at + REPORT_S:
                        self._report_now.clear()
                        reported_at = time.monotonic()
                        self._channel.send(self._report().to_message())
                threading.Thread(target=_exit_late, name="saccade end", daemon=True).start()
                self._end_streams(self._controller.streams)
            return 0
        except Exception as error:
            self._channel.send({"is": "failed", "kind": type(error).__name__, "error": one_line(str(error))})
            if os.environ.get("SACCADE_DEBUG") == "1":
                log.exception("the worker failed")
            return 1

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
        events = EventHub()
        events.add(lambda record: self._send({"is": "event", "record": dict(record)}), history=True)
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

    def _receive(self) -> None:
        for message in self._channel.messages():
            do = message["do"]
            if do == "stop":
                break
            if do == "report":
                self._report_now.set()
            elif work := self._work.get(do):
                if message.get("held"):
                    self._held.expect(message["key"])
                # A thread each: one that waits for a camera or a disk must not keep the others waiting.
                threading.Thread(target=work, args=(message,), name=f"saccade {do}", daemon=True).start()
        self._stopping.set()  # also where the supervisor is gone

    def _open_stream(self, message: Message) -> None:
        try:
            while self._controller is None:
                time.sleep(_POLL_S)  # the supervisor waits for `ready`, so this is for others
            config = ListedStream.model_validate({**message["config"], "name": message["stream"]})
            held = bool(message.get("held"))
            if message.get("again") and not held:
                self._await_end(config)
            if message.get("repeat"):
                config = config.model_copy(update={"loop": True})
            stream = self._controller.local.open(config, checked=bool(message.get("checked")))
            if held:
                self._held.add(message["stream"], message["key"], stream)
                return
            with stream:
                self._begin(message, stream)
        except Exception as error:
            self._held.drop(message["key"])
            self._refuse(message, error)

    def _begin_stream(self, message: Message) -> None:
        """Have a stream begin that is open: another worker has let go of it."""
        try:
            with self._held.take(message["key"]) as stream:
                if stream.held is not None and (after := message.get("after")) is not None:
                    stream.held.after = (after[0], after[1], after[2])
                self._await_end(stream.config)
                self._begin(message, stream)
        except Exception as error:
            self._refuse(message, error)

    def _begin(self, message: Message, stream: OpenedStream) -> None:
        """Start a stream, with the events that went on where it ran last."""
        assert self._controller is not None
        stream.resume(read_event(record) for record in message.get("events", ()))
        self._opened(message, self._controller.attach(stream))

    def _await_end(self, config: ListedStream) -> None:
        """Wait for the stream's last run here, if it is ending, and move files aside that it has left."""
        with self._lock:
            run = self._leaving.pop(config.name or "", None)
        if run is not None:
            run.join(_LEAVE_S)
        each = [Target(text) for text in self._settings["config"].get("sinks", [])]
        keep_outputs(config.name or "", config, each)

    def _opened(self, message: Message, run: Run) -> None:
        name, key = message["stream"], message["key"]
        with self._lock:  # so that neither its end is reported before, nor a command to close it is done before
            self._channel.send({"is": "opened", "stream": name, "key": key, "live": run.source.info.live})
            self._runs[name] = run, key
            self._sent[name] = _plain(run)

    def _refuse(self, message: Message, error: Exception) -> None:
        reason = one_line(str(error) or type(error).__name__)
        answer = {"is": "refused", "stream": message["stream"], "key": message["key"]}
        self._channel.send({**answer, "kind": _kind_of(error), "error": reason})

    def _close_stream(self, message: Message) -> None:
        name, key, error, captured = message["stream"], message["key"], None, None
        if not self._held.drop(key):
            with self._lock:
                run, opened = self._runs.get(name, (None, key))
                if opened == key:
                    self._runs.pop(name, None)
            if opened == key:  # else one that was held has come to nothing by itself: the stream goes on
                error = self._end_run(name, run, moves=bool(message.get("moves")))
                captured = run.captured if run else None
        answer = {"is": "closed", "stream": name, "key": key, "error": error, "captured": captured}
        self._channel.send(answer)

    def _end_run(self, name: str, run: Run | None, *, moves: bool) -> str | None:
        """End a stream, whose run may have ended by itself; returns why it has not."""
        if run is not None and (stage := event_stage(run.stages)) is not None:
            stage.moves = moves
        if run is not None and moves:  # the next begins when all is written: sources close slowly
            run.stop()
            with self._lock:
                self._leaving[name] = run
            error = None if run.wait_written(_LEAVE_S) else f"'{name}' was stopped, but has not ended"
        else:
            error = self._remove(name)
        self._session_flush()
        return error

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
            self._leaving = {name: run for name, run in self._leaving.items() if not run.ended}
        for name, run, key in ended:
            self._session_flush()
            report = run.report()
            self._send(
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

    def _session_flush(self) -> None:
        assert self._controller is not None
        self._controller.local.events.hub.flush()  # so that the supervisor has a stream's events before its end

    def _report(self) -> WorkerReport:
        now, before = _usage(), self._usage
        self._usage = now
        seconds = max(1e-3, now[0] - before[0])
        busy = min(1.0, (now[1] - before[1]) / seconds / self._settings["processors"])
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

    def _send(self, message: Message) -> None:
        self._channel.send(message)

    def _end_streams(self, streams: Streams) -> None:
        """Finish what the engine has, but not for long; closing the streams then closes the files."""
        runs = streams.stop()
        self._held.close()
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


def _exit_late() -> None:
    time.sleep(_LIMIT_S)
    os._exit(1)


def _kind_of(error: Exception) -> str:
    """The name of the error, or of the class that it is derived from and the HTTP API knows."""
    known = ("NotAllowedError", "StreamError", "ConfigError", "SourceError", "EngineError", "SinkError")
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((name for name in known if name in names), names[0])


def _plain(run: Run) -> dict[str, Any]:
    return {} if run.config is None else plain(run.config)


def _usage() -> tuple[float, float]:
    """When, and the processor time of the process so far, in seconds."""
    return time.monotonic(), time.process_time()
