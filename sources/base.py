"""Base class of all video sources, and the metadata that a source reports."""

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
    """Metadata of a source, known before its first frame.

    Attributes:
        codec: name of the codec, such as "h264"; the file format, such as "jpeg", for images.
        width, height: size in pixels of the upright frame, after rotation. Later frames may differ.
        average_rate: average number of frames per second before `vid_stride` is applied; None if unknown.
        frames: estimated number of frames that one iteration yields, with `vid_stride`, `start` and `end` applied; None
            if unknown.
        time_base: seconds per unit of `Frame.pts`.
        duration_s: length of the whole stream in seconds; None if unknown or endless.
        live: True if frames arrive in real time and late frames should be dropped.
        audio: True if the source also has an audio stream.
        url: path or address, without credentials.
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
    """Base class of all video sources. Iterate a source in one thread; close it from any thread.

    The iteration ends when the source ends or is closed. It raises `SourceError` if the source fails permanently.

    Args:
        name: name of the stream.
        vid_stride: yield every `vid_stride`-th frame.

    Raises:
        SourceError: if `vid_stride` is less than 1.
    """

    _info: SourceInfo
    _decoder = ""

    gpu: int | None = None
    """Index of the GPU whose memory stores decoded frames; None for main memory. Set it before iterating."""

    def __init__(self, name: str, vid_stride: int = 1) -> None:
        if vid_stride < 1:
            raise SourceError(f"vid_stride (use every Nth frame) must be 1 or more, not {vid_stride}")
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
        """Metadata of the source, such as codec and frame size; available before the first frame."""
        return self._info

    @property
    def decoder(self) -> str:
        """Name of the decoder, such as "h264 (cuda)"; "" before the first frame or if no decoder is used."""
        return self._decoder

    @property
    def corrupt_packets(self) -> int:
        """Number of damaged packets or frames that were skipped since the iteration began."""
        return self._corrupt

    @abstractmethod
    def __iter__(self) -> Iterator[Frame]:
        """Yield the source's frames in presentation order."""

    def close(self) -> None:
        """Close the source. This ends a running iteration. Thread-safe; may be called more than once."""
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
