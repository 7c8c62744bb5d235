"""What every source has in common: its interface and the metadata it reports.

Knows nothing of models, results or sinks.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from types import TracebackType
from typing import Self

from saccade.sources.errors import SourceError
from saccade.sources.frame import Frame


@dataclass(slots=True, frozen=True)
class SourceInfo:
    """What is known of a source before its first frame.

    Attributes:
        codec: name of the codec, such as "h264"; for frames the file format, such as "jpeg".
        width, height: size in pixels of the upright frame, after rotation. Later frames may differ.
        average_rate: frames per second of the whole stream, before `vid_stride`; None when unknown.
        frames: how many frames an iteration will hand on, after `vid_stride`, `start` and `end`; an estimate, None when
            unknown.
        time_base: seconds of one pts unit.
        duration_s: length of the whole stream in seconds; None when unknown or endless.
        live: True when frames arrive in real time and late ones should be dropped.
        audio: True when the source has an audio stream as well.
        url: path or address, free of credentials.
    """

    codec: str
    width: int
    height: int
    average_rate: Fraction | None
    frames: int | None
    time_base: Fraction
    duration_s: float | None
    live: bool
    audio: bool
    url: str


class Source(ABC):
    """A source of frames: iterate it in one thread, close it from any.

    Iteration raises `SourceError` when the source fails for good, and simply ends when it is over or closed. A
    subclass sets `_info` and yields the frames, until `_closed` is set; damaged packets are counted in `_corrupt`.

    Args:
        name: of the stream.
        vid_stride: hand on every `vid_stride`-th frame.

    Raises:
        SourceError: if `vid_stride` is less than 1.
    """

    _info: SourceInfo
    _decoder = ""

    gpu: int | None = None
    """Number of the GPU in whose memory decoded frames may stay; to be set before iterating. None: in main memory."""

    def __init__(self, name: str, vid_stride: int = 1) -> None:
        if vid_stride < 1:
            raise SourceError(f"vid_stride must be 1 or more, not {vid_stride}")
        self._name = name
        self._stride = vid_stride
        self._closed = threading.Event()
        self._corrupt = 0

    @property
    def name(self) -> str:
        """Name of the stream, as in `Frame.stream`."""
        return self._name

    @property
    def info(self) -> SourceInfo:
        """What is known of the source, from construction on."""
        return self._info

    @property
    def decoder(self) -> str:
        """What decodes it, such as "h264 (cuda)"; "" before the first frame, and where nothing does."""
        return self._decoder

    @property
    def corrupt_packets(self) -> int:
        """Packets or frames of the current iteration that were damaged, hence skipped."""
        return self._corrupt

    @abstractmethod
    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames in presentation order."""

    def close(self) -> None:
        """End the iteration at its next packet, and every later one at once. Callable from any thread, repeatedly."""
        self._closed.set()

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the source."""
        self.close()
