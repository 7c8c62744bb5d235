"""Parses the target of a recording: a folder with options, or a path with time placeholders such as `%H%M`."""

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
    """Location, file length and retention of one stream's recording.

    Attributes:
        names: pattern of the file names.
        length_s: minimum length of a file in seconds. The next file starts at the first keyframe after this time.
        retention: limits of the files' age and total size.
    """

    names: SegmentNames
    length_s: float
    retention: Retention

    @classmethod
    def parse(cls, text: str, stream: str) -> RecordingPlace:
        """Parse the location of a recording, with its options.

        Args:
            text: a folder, or a path that ends in .mp4 and can contain `{stream}` and time placeholders. Both can be
                followed by options such as `?segment=10m`.
            stream: name of the stream. It must be a valid file name.

        Raises:
            SinkError: if the path or an option is invalid.
        """
        path, _, given = text.rpartition("?") if "=" in text.rpartition("?")[2] else (text, "", "")
        options = Options(given, path)
        length_s, keep = options.seconds("segment", DEFAULT_S), options.age("keep")
        retention = Retention.of_options(options, keep)
        options.reject_unknown()
        if "://" in path or not path:
            raise SinkError(f"record: {path or 'an empty path'} is not a folder; set the path of a folder")
        if not is_pattern(path):
            if path.lower().endswith(".mp4"):
                raise SinkError(f"record: {path} must be a folder, or a path with time placeholders, such as {_NAMES}")
            path = str(Path(path.replace("%", "%%")) / _NAMES)
        elif STREAM not in path or not path.endswith(".mp4"):
            raise SinkError(f"record: {path} must contain {STREAM} (the stream's name) and end in .mp4")
        return cls(SegmentNames(path.replace(STREAM, stream.replace("%", "%%"))), length_s, retention)

    def files(self) -> Iterator[Path]:
        """Yield all playable files of the recording, including those of earlier runs, in no particular order."""
        below = "/".join("*" for _ in range(self.names.depth + 1))
        with suppress(FileNotFoundError):  # a folder was deleted meanwhile
            yield from (one for one in self.names.root.glob(below) if one.suffix == ".mp4" and self.names.owns(one))
