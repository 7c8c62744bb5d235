"""Where results go. Knows frames and results, but no source, model or pipeline."""

from sinks.base import EndsStreams, Sink, SinkClosedError, SinkError
from sinks.callback import CallbackSink
from sinks.choose import open_sink
from sinks.display import DisplaySink
from sinks.jsonl import JsonlSink
from sinks.mp4 import Mp4Sink
from sinks.mqtt import MqttSink
from sinks.overlay import color_of, draw
from sinks.record import Latency, make_record
from sinks.recording import RecordingSink
from sinks.webhook import WebhookSink

__all__ = [
    "CallbackSink",
    "DisplaySink",
    "EndsStreams",
    "JsonlSink",
    "Latency",
    "Mp4Sink",
    "MqttSink",
    "RecordingSink",
    "Sink",
    "SinkClosedError",
    "SinkError",
    "WebhookSink",
    "color_of",
    "draw",
    "make_record",
    "open_sink",
]
