"""Sinks: outputs for frames and analysis results, such as files, MQTT and webhooks."""

from saccade.sinks.base import (
    ReaderGoneError,
    Sink,
    SinkClosedError,
    SinkError,
    SinkStats,
    SourceHints,
    SupportsEvents,
    SupportsStreamEnd,
)
from saccade.sinks.callback import CallbackSink
from saccade.sinks.display import DisplaySink
from saccade.sinks.factory import open_sink
from saccade.sinks.guard import SinkGuard, SinkStatus
from saccade.sinks.jsonl import JsonlSink
from saccade.sinks.messaging.mqtt import MqttSink
from saccade.sinks.messaging.webhook import WebhookSink
from saccade.sinks.overlay import color_of, draw
from saccade.sinks.record import Latency, make_record
from saccade.sinks.video.mp4 import Mp4Sink
from saccade.sinks.video.segmented_mp4 import RecordingSink

__all__ = [
    "CallbackSink",
    "DisplaySink",
    "JsonlSink",
    "Latency",
    "Mp4Sink",
    "MqttSink",
    "ReaderGoneError",
    "RecordingSink",
    "Sink",
    "SinkClosedError",
    "SinkError",
    "SinkGuard",
    "SinkStats",
    "SinkStatus",
    "SourceHints",
    "SupportsEvents",
    "SupportsStreamEnd",
    "WebhookSink",
    "color_of",
    "draw",
    "make_record",
    "open_sink",
]
