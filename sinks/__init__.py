"""Where results go. Knows frames and results, but no source, model or pipeline."""

from sinks.base import EndsStreams, Sink, SinkClosedError, SinkError
from sinks.callback import CallbackSink
from sinks.choose import open_sink
from sinks.display import DisplaySink
from sinks.jsonl import JsonlSink
from sinks.mp4 import Mp4Sink
from sinks.overlay import color_of, draw
from sinks.record import Latency, make_record
from sinks.recording import RecordingSink

__all__ = [
    "CallbackSink",
    "DisplaySink",
    "EndsStreams",
    "JsonlSink",
    "Latency",
    "Mp4Sink",
    "RecordingSink",
    "Sink",
    "SinkClosedError",
    "SinkError",
    "color_of",
    "draw",
    "make_record",
    "open_sink",
]
