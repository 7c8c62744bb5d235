"""Where the recording of a stream goes: `/video`, `/video?segment=5m&keep=7d&max_gb=50`, or a path with a time in it.

Pure, but for `files`, which lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from saccade.sinks.base import SinkError
from saccade.sinks.retention import Retention
from saccade.sinks.urls import Options
from saccade.sinks.video.segments import DEFAULT_S, SegmentNames, is_pattern

STREAM = "{stream}"
_NAMES = f"{STREAM}/%Y-%m-%d/%H-%M-%S.mp4"


@dataclass(slots=True)
class RecordingPlace:
    """The files of one stream's recording.

    Attributes:
        names: what they are called.
        length_s: of a file, in seconds; the next one begins at the first key frame after.
        retention: limits of their age and total size.
    """

    names: SegmentNames
    length_s: float
    retention: Retention

    @classmethod
    def parse(cls, text: str, stream: str) -> RecordingPlace:
        """Read a folder, or a path ending in .mp4 with `{stream}` and a time such as %Y%m%d-%H%M%S, and options.

        Args:
            text: as the user typed it.
            stream: the stream's name, which is safe in a path.

        Raises:
            SinkError: if it is neither, or an option is wrong.
        """
        path, _, given = text.rpartition("?") if "=" in text.rpartition("?")[2] else (text, "", "")
        options = Options(given, path)
        length_s, keep = options.seconds("segment", DEFAULT_S), options.age("keep")
        retention = Retention.of_options(options, keep)
        options.reject_unknown()
        if "://" in path or not path:
            raise SinkError(f"record: {path or 'nothing'} is no folder")
        if not is_pattern(path):
            if path.lower().endswith(".mp4"):
                raise SinkError(f"record: {path} should be a folder, or a path with a time in it: {_NAMES}")
            path = str(Path(path.replace("%", "%%")) / _NAMES)
        elif STREAM not in path or not path.endswith(".mp4"):
            raise SinkError(f"record: {path} should have {STREAM} in it, for the stream's name, and end in .mp4")
        return cls(SegmentNames(path.replace(STREAM, stream.replace("%", "%%"))), length_s, retention)

    def files(self) -> Iterator[Path]:
        """The files that can be played, of this run and earlier ones, in no order."""
        below = "/".join("*" for _ in range(self.names.depth + 1))
        with suppress(FileNotFoundError):  # a folder was deleted meanwhile
            yield from (one for one in self.names.root.glob(below) if one.suffix == ".mp4" and self.names.owns(one))
