"""Formats the configuration of a stream for display, without secrets."""

from __future__ import annotations

from typing import Any

from saccade.pipeline.config.edit import plain_setting
from saccade.pipeline.config.stream import ListedStream
from saccade.pipeline.config.yaml_text import key_lines


def shown_stream(stream: ListedStream) -> dict[str, Any]:
    """Return the settings of a stream that are not null, without credentials."""
    from saccade.sources import redact  # its package imports FFmpeg

    shown: dict[str, Any] = {"name": stream.name, "source": redact(stream.source)}
    if stream.record_source is not None:
        shown["record_source"] = redact(stream.record_source)
    for key in ListedStream.model_fields:
        if key not in shown and (value := plain_setting(stream, key)) is not None:
            shown[key] = value
    return {**shown, "sinks": [_without_secrets(sink) for sink in stream.sinks]}


def text_of_stream(stream: ListedStream) -> str:
    """Return the configuration of a stream as YAML, without secrets."""
    return "".join(key_lines(key, value, "") for key, value in shown_stream(stream).items())


def _without_secrets(sink: str) -> str:
    """Return the address of an output without its options, which can contain tokens."""
    from saccade.sinks.urls import redact_target

    return redact_target(sink).partition("?")[0] if "://" in sink or sink.startswith("whep:") else sink
