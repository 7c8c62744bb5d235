"""Opens a sink from its target: an address, a path, `-` or `display`. `SINKS` lists all kinds of sinks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module

from saccade.sinks.base import Sink, SinkError, SourceHints
from saccade.sinks.urls import redact_target, split_path
from saccade.sources.live.packets import AudioPacket

Opener = Callable[[str, SourceHints], Sink]


@dataclass(slots=True, frozen=True)
class SinkKind:
    """A kind of sink: the targets that select it, and the function that opens it.

    Attributes:
        opener: the function, or its name such as `module:function`. A name is imported on first use.
        schemes: URL schemes that select this kind.
        suffixes: file suffixes that select this kind, in lower case.
        words: fixed words that select this kind, such as `-` or `display`.
    """

    opener: str | Opener
    schemes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def open(self, target: str, hints: SourceHints) -> Sink:
        """Open a sink of this kind. Raises SinkError if that fails.

        Args:
            target: address or path, which must belong to this kind.
            hints: information about the stream.
        """
        if not isinstance(self.opener, str):
            return self.opener(target, hints)
        module, _, name = self.opener.partition(":")
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        sink: Sink = found(target, hints)  # type: ignore[operator]
        return sink


SINKS: list[SinkKind] = [
    SinkKind("saccade.sinks.jsonl:JsonlSink.open", suffixes=(".jsonl", ".ndjson"), words=("-",)),
    SinkKind("saccade.sinks.video.segmented_mp4:open_mp4", suffixes=(".mp4", ".m4v")),
    SinkKind("saccade.sinks.display:DisplaySink.open", words=("display",)),
    SinkKind("saccade.sinks.websocket.server:WebSocketSink.open", schemes=("ws", "wss")),
    SinkKind("saccade.sinks.messaging.mqtt:MqttSink.open", schemes=("mqtt", "mqtts")),
    SinkKind("saccade.sinks.messaging.webhook:WebhookSink.open", schemes=("http", "https")),
]
"""All kinds of sinks. `open_sink` uses the first kind that matches the target."""


def open_sink(
    target: str | os.PathLike[str],
    *,
    rate: Fraction | None = None,
    audio_from: str | os.PathLike[str] | None = None,
    listen: Callable[[Callable[[AudioPacket], None]], None] | None = None,
) -> Sink:
    """Open a sink from the text that a user typed.

    - `out.mp4`: a video with overlay.
    - `door-%Y%m%d-%H%M%S.mp4` or `out.mp4?segment=10m`: a video with overlay, split into several files.
    - `out.jsonl`: JSON records. `out.jsonl?max_mb=100&keep=5` rotates the file at 100 MB.
    - `-`: JSON records on standard output.
    - `display`: a window.
    - `ws://HOST:PORT`, `wss://…`: a WebSocket server; see `WebSocketSink`.
    - `mqtt://HOST/PREFIX`, `mqtts://…`: an MQTT broker; see `MqttSink`.
    - `http://…`, `https://…`: a webhook; see `WebhookSink`.

    Args:
        target: one of the targets above.
        rate: approximate frames per second of the source, for videos.
        audio_from: media file whose audio video sinks copy. Sinks never overwrite this file.
        listen: registers a callback for the audio packets of a live source, such as `LiveSource.listen`.

    Raises:
        SinkError: if the target is unknown or cannot be opened.
    """
    text = os.fspath(target)
    hints = SourceHints(rate, None if audio_from is None else os.fspath(audio_from), listen)
    kind = kind_of(text)
    if kind is not None:
        return kind.open(text, hints)
    scheme, separator, _ = text.partition("://")
    if text.partition(":")[0].lower() == "whep":
        raise SinkError("a whep sink works only with the command `saccade run --sink whep:PORT`")
    if separator:
        known = ", ".join(kind.schemes[0] for kind in SINKS if kind.schemes)
        raise SinkError(
            f"{scheme.lower()}:// sinks are not supported ({redact_target(text)}); use {known}, whep:PORT or a file"
        )
    raise SinkError(
        f"unknown output type: {redact_target(text)}; use '-', 'display', or a file name that ends in .mp4 or .jsonl"
    )


def kind_of(target: str) -> SinkKind | None:
    """Return the kind of sink for an address or path; None if it is unknown."""
    scheme, separator, _ = target.partition("://")
    if separator:
        return next((kind for kind in SINKS if scheme.lower() in kind.schemes), None)
    for kind in SINKS:
        path, _ = split_path(target, kind.suffixes)
        if target in kind.words or (kind.suffixes and path.lower().endswith(kind.suffixes)):
            return kind
    return None
