"""Opens the outputs of a configuration.

If the address or path of an output contains `{stream}`, one output is opened per stream, and `{stream}` is replaced by
the name of the stream. An output in the settings of a stream belongs to this stream. All other outputs are shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.pipeline.config import STREAM, RunConfig
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.output import Output
from saccade.sinks import DisplaySink, JsonlSink, Sink, open_sink
from saccade.sinks.base import SourceHints
from saccade.sinks.factory import SinkKind
from saccade.sinks.jsonl import check_standard_output
from saccade.sinks.still import check_still
from saccade.sinks.urls import redact_target
from saccade.sinks.video.mp4_writer import check_size
from saccade.sinks.video.segmented_mp4 import SUFFIXES as VIDEO_SUFFIXES
from saccade.sinks.video.segments import is_pattern
from saccade.sources import LiveSource, Source, SourceInfo

HEATMAP = "--heatmap"  # written by a stage and not by a sink; checked for overwriting other files
WHEP = "whep:"  # served by the pipeline, because sinks must not import it
_WHEP_SINK = SinkKind("saccade.pipeline.api.whep_sink:open_whep")


@dataclass(slots=True, frozen=True)
class Target:
    """An output in a configuration.

    Attributes:
        text: address or path.
        flag: command-line flag that defines the output, for error messages.
    """

    text: str
    flag: str = "--sink"

    @property
    def path(self) -> Path | None:
        """The path of an output file; None for an address, a window or standard output."""
        if self.text in ("-", "display") or "://" in self.text or self.text.startswith(WHEP):
            return None
        return Path(self._without_options)

    @property
    def shown(self) -> str:
        """The output as displayed to users: its address or path, without options and secrets."""
        if self.path is None:
            return redact_target(self.text).partition("?")[0]
        return redact_target(self._without_options)

    @property
    def _without_options(self) -> str:
        before, _, options = self.text.rpartition("?")
        return before if before and "=" in options else self.text

    @property
    def replaces(self) -> bool:
        """Whether opening the output overwrites an existing file."""
        return self.path == Path(self.text) and not is_pattern(self.text)

    @property
    def each(self) -> bool:
        """Whether each stream has its own output: the address or path contains `{stream}`."""
        return STREAM in self.text

    def of(self, stream: str) -> Target:
        """Return the output for one stream: `{stream}` is replaced by the stream's name."""
        return Target(self.text.replace(STREAM, stream), self.flag)


def targets_of(config: RunConfig) -> list[Target]:
    """Return the outputs of a configuration, in the order in which they are opened."""
    targets = [Target("display", "--display")] if config.display else []
    targets += [Target(config.out, "--out")] if config.out else []
    targets += [Target(text) for text in config.sinks]
    # Opened last, because opening empties an existing file.
    return [*targets, Target(config.jsonl, "--jsonl")] if config.jsonl else targets


def shown_targets(config: RunConfig) -> list[str]:
    """Return the outputs for the summary of a run, without duplicates and secrets."""
    targets = [*targets_of(config), *(Target(text) for stream in config.streams for text in stream.sinks)]
    targets += dict.fromkeys(Target(one.heatmap, HEATMAP) for one in config.each() if one.heatmap)
    return [target.shown for target in targets if target.text != "display"]


def check_targets(targets: Sequence[Target], sources: Iterable[str]) -> None:
    """Check that no output overwrites a source or another output.

    Args:
        targets: outputs of all streams.
        sources: sources of all streams.

    Raises:
        ConfigError: if an output would overwrite a source or another output.
    """
    files = [(target, path) for target in targets if (path := target.path)]
    inputs = [path for path in map(Path, sources) if path.exists()]
    seen: dict[Path, Target] = {}
    for target, path in files:
        if target.flag == HEATMAP and not os.access(path.parent, os.W_OK):  # it is written at the end of the run
            raise ConfigError(f"{HEATMAP}: cannot write {path}: the folder does not exist or is read-only")
        if path.exists() and any(path.samefile(source) for source in inputs):
            raise ConfigError(f"{target.flag}: {path} is also the source; choose another output file")
        first = seen.setdefault(path.resolve(), target)
        if first is not target:
            raise ConfigError(f"{first.flag} and {target.flag} name the same file, {path}; choose different files")


def check_frames(targets: Iterable[Target], info: SourceInfo) -> None:
    """Check that the outputs support the frames of a source, for example the frame size.

    This check runs before the model is loaded.

    Raises:
        SinkError: if an output does not support the frames.
    """
    for target in targets:
        path = target.path
        if target.text == "-":
            check_standard_output()
        elif path is not None and target.flag == HEATMAP:
            check_still(path, info.width, info.height)
        elif path is not None and target.flag != "--jsonl" and path.suffix.lower() in VIDEO_SUFFIXES:
            check_size(path, info.width, info.height)


def open_output(target: Target, source: Source | None = None, vid_stride: int = 1) -> Output:
    """Open an output of a configuration.

    Args:
        target: the output, with `{stream}` replaced by the name of the stream.
        source: the source of the output, or None if several sources share it.
        vid_stride: process every Nth frame.

    Raises:
        ConfigError: if the output supports only one stream, and several streams use it.
        SinkError: if the output cannot be opened.
    """
    # Watched live by people, so only the newest frame matters.
    watched = target.text == "display" or target.text.startswith(WHEP)
    output = Output(_open(target, source, vid_stride), NEWEST if watched else None, name=target.shown)
    if source is None and not output.sink.shared:
        output.sink.close()
        what = redact_target(target.text)
        raise ConfigError(
            f"{target.flag}: {what} supports only one stream; for several streams, use {STREAM} in the output address"
        )
    return output


def _open(target: Target, source: Source | None, vid_stride: int) -> Sink:
    if target.flag == "--display":
        return DisplaySink()
    if target.flag == "--jsonl":
        return JsonlSink(target.text)  # independent of its suffix
    if target.text.startswith(WHEP):
        return _WHEP_SINK.open(target.text, SourceHints())
    if source is None:
        return open_sink(target.text)
    rate = source.info.average_rate
    return open_sink(
        target.text,
        rate=rate / vid_stride if rate else None,
        audio_from=source.info.url if source.info.audio else None,
        listen=source.listen if isinstance(source, LiveSource) else None,
    )
