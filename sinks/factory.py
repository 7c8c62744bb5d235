"""Finds the right sink for what a user typed. Knows no source, model or pipeline."""

from __future__ import annotations

import os
from fractions import Fraction

from saccade.sinks.base import Sink, SinkError
from saccade.sinks.display import DisplaySink
from saccade.sinks.jsonl import JsonlSink
from saccade.sinks.urls import redact, split_path
from saccade.sinks.video.mp4 import Mp4Sink
from saccade.sinks.video.segmented_mp4 import RecordingSink
from saccade.sinks.video.segments import DEFAULT_S, is_pattern

_MP4_SUFFIXES = (".mp4", ".m4v")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


def open_sink(
    target: str | os.PathLike[str],
    *,
    rate: Fraction | None = None,
    audio_from: str | os.PathLike[str] | None = None,
) -> Sink:
    """Open the sink that `target` asks for.

    - `out.mp4`: video with overlay; `door-%Y%m%d-%H%M%S.mp4` or `out.mp4?segment=10m`: the same in segments.
    - `out.jsonl`: records; `out.jsonl?max_mb=100&keep=5`: rotated by size. `-`: records on standard output.
    - `display`: a window.
    - `ws://HOST:PORT`, `wss://…`: a WebSocket feed to connect to; see `WebSocketSink`.
    - `mqtt://HOST/PREFIX`, `mqtts://…`: an MQTT broker; see `MqttSink`.
    - `http://…`, `https://…`: a webhook; see `WebhookSink`.

    Args:
        target: one of the above.
        rate: frames per second of the source; a hint for videos.
        audio_from: file whose sound a video takes over; it is never overwritten.

    Raises:
        SinkError: if there is no such sink or it cannot be opened, in one line for the user.
    """
    text = os.fspath(target)
    scheme, separator, _ = text.partition("://")
    if separator:
        return _open_address(text, scheme.lower())
    if text.partition(":")[0].lower() == "whep":
        raise _whep()
    if text == "display":
        return DisplaySink()
    if text == "-":
        return JsonlSink(text)
    path, options = split_path(text, _MP4_SUFFIXES + _JSONL_SUFFIXES)
    if path.lower().endswith(_JSONL_SUFFIXES):
        megabytes, keep = options.number("max_mb"), options.count("keep", 5, 1000)
        options.done()
        if options and megabytes is None:
            raise SinkError(f"{path}: keep is for files with max_mb, such as {path}?max_mb=100&keep={keep}")
        return JsonlSink(path, max_bytes=round(megabytes * 1e6) if megabytes else None, keep=keep)
    if path.lower().endswith(_MP4_SUFFIXES):
        segment = options.seconds("segment", DEFAULT_S)
        segmented = is_pattern(path) or bool(options)
        options.done()
        if segmented:
            return RecordingSink(path, length_s=segment, rate=rate, audio_from=audio_from)
        return Mp4Sink(path, rate=rate, audio_from=audio_from)
    raise SinkError(f"cannot tell what to write to {text}: end it in .mp4 or .jsonl, or use '-' or 'display'")


def _open_address(text: str, scheme: str) -> Sink:
    # Imported here: each brings a library that none of the others needs.
    if scheme in ("ws", "wss"):
        from saccade.sinks.websocket.server import WebSocketSink

        return WebSocketSink(text)
    if scheme in ("mqtt", "mqtts"):
        from saccade.sinks.messaging.mqtt import MqttSink

        return MqttSink(text)
    if scheme in ("http", "https"):
        from saccade.sinks.messaging.webhook import WebhookSink

        return WebhookSink(text)
    if scheme == "whep":
        raise _whep()
    raise SinkError(f"there are no {scheme}:// sinks: {redact(text)} should be ws, mqtt or http, or a file")


def _whep() -> SinkError:
    return SinkError("whep: needs the streams themselves; it belongs to `saccade run --sink whep:PORT`")
