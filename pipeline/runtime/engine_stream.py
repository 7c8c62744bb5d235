"""A stream's side of the engine: its share, and the frames that the engine has, oldest first. Knows no sinks.

A frame that a newer one has replaced in the engine leaves at once, counted to the frame behind it: it holds no image,
and does not stand in the way of newer ones.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from saccade.engine.core.admission import StreamSettings
from saccade.engine.errors import SupersededError
from saccade.engine.futures import ResultFuture
from saccade.engine.results import Result
from saccade.engine.tasks.task import Task, Window
from saccade.pipeline.analytics.saccades.stage import SaccadeSettings
from saccade.pipeline.config import ShareSettings, StreamConfig
from saccade.pipeline.runtime.bounded_queue import QueueClosed
from saccade.sources import Frame, YuvPlanes

if TYPE_CHECKING:
    from saccade.engine import Engine, Image
    from saccade.engine.image import YuvImage


_WATCHED = 4.0  # times the weight of a stream that is watched


@dataclass(slots=True, frozen=True)
class Share:
    """What a live stream gets of the engine, beside others.

    Attributes:
        weight: with 4, as many frames as four streams with 1, while all of them have more than are run.
        max_fps: most frames a second; None for no limit.
        deadline_ms: a frame whose result would come later than that after the frame is given up; None for never.
    """

    weight: float = 1.0
    max_fps: float | None = None
    deadline_ms: float | None = None


def share_of(settings: ShareSettings) -> Share:
    """What a configuration gives a stream."""
    return Share(settings.weight, settings.max_fps, settings.deadline_ms)


def saccades_of(settings: StreamConfig) -> SaccadeSettings:
    """What a configuration wants to be looked at again."""
    return SaccadeSettings(settings.most_saccades, settings.saccade_sweep, settings.max_fps, settings.motion_mask)


class EngineStream:
    """Submits the frames of one stream. Its share may be set by any thread.

    Args:
        engine: runs them.
        name: of the stream.
        in_flight: how many it works on at a time.
        share: what it gets of the engine; the rate and the deadline are for live streams only.
        live: whether the source is.
        newest: whether a newer frame replaces one that waits.
        gpu: number of the GPU that the engine runs on, and frames may be on; None for a CPU.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        in_flight: int,
        share: Share,
        *,
        live: bool,
        newest: bool,
        gpu: int | None = None,
    ) -> None:
        self._engine, self._key = engine, (name, id(self))
        self._gpu = gpu
        self._in_flight, self._live, self._newest = in_flight, live, newest
        self._share, self._watched = share, False
        self._newest_submitted: tuple[ResultFuture, float] | None = None
        self._begun_at = -math.inf  # when the newest frame that the engine has begun was submitted

    @property
    def share(self) -> Share:
        """What it gets of the engine."""
        return self._share

    @share.setter
    def share(self, share: Share) -> None:
        self._share = share
        self.configure()

    @property
    def watched(self) -> bool:
        """Whether it is being watched."""
        return self._watched

    @watched.setter
    def watched(self, watched: bool) -> None:
        if watched != self._watched:
            self._watched = watched
            self.configure()

    def configure(self) -> None:
        """Tell the engine of its share."""
        weight = self._share.weight * (_WATCHED if self._watched else 1)
        rate = self._share.max_fps if self._live else None
        self._engine.configure_stream(self._key, StreamSettings(weight, rate, self._in_flight, self._newest))

    def submit(
        self, frame: Frame, tasks: Sequence[Task], tiles: int, now: float, windows: Sequence[Window] = ()
    ) -> ResultFuture:
        """Give the engine a frame; `now` is `time.monotonic()`. Errors as in `Engine.submit`."""
        limit_ms, left_s = self._share.deadline_ms, None
        if limit_ms is not None and self._live:
            left_s = (limit_ms - frame.decode_ms) / 1e3 - (now - frame.decoded_at)
        # Tiles are cut from the RGB.
        later = partial(_image_of, frame, self._gpu if tiles == 1 else None)
        image = later if self._newest else later()
        self._note_begun()
        result = self._engine.submit(image, tasks, tiles, deadline_s=left_s, stream=self._key, windows=windows)
        self._newest_submitted = result, now
        return result

    def beyond_rate(self, now: float) -> bool:
        """Whether `max_fps` lets none of its frames be begun at `now`: one that is replaced then was not wanted."""
        self._note_begun()
        rate = self._share.max_fps if self._live else None
        return rate is not None and now < self._begun_at + 1 / rate

    def _note_begun(self) -> None:
        if self._newest_submitted is not None and self._newest_submitted[0].begun:
            self._begun_at = self._newest_submitted[1]

    def close(self) -> None:
        """Let the engine forget it."""
        self._engine.forget_stream(self._key)


def _image_of(frame: Frame, gpu: int | None) -> Image:
    """The image, as the decoder gave it for an engine on a GPU; else converted now if it was not before."""
    planes = frame.planes() if gpu is not None and frame.planes is not None else None
    return frame.image if planes is None or planes.gpu not in (None, gpu) else yuv_image(planes)


def yuv_image(planes: YuvPlanes) -> YuvImage:
    """The planes as the engine's image, in the decoder's memory, which it keeps while it lives."""
    import torch  # which the engine has loaded by now

    from saccade.engine.image import YuvImage

    # The capsule, not the plane: torch would name a stream to wait on, which PyAV refuses.
    y, *chroma = (torch.utils.dlpack.from_dlpack(plane.__dlpack__()) for plane in planes.planes)
    u, v = chroma if len(chroma) == 2 else chroma[0].unbind(-1)
    return YuvImage(y, u, v, planes.matrix, planes.full_range)


@dataclass(slots=True)
class InFlight:
    """A frame that was given to the engine.

    Attributes:
        frame: the frame.
        submitted_at: `time.monotonic()` at that moment.
        result: the engine's.
        replaced_as: the cause of its loss if a newer one takes its place, as in `Report.drops`.
        lost: frames before it that newer ones have replaced, besides its `dropped_before`.
    """

    frame: Frame
    submitted_at: float
    result: Future[Result]
    replaced_as: str = "full"
    lost: int = 0

    @property
    def superseded(self) -> bool:
        """Whether a newer frame has taken its place."""
        result = self.result
        return result.done() and not result.cancelled() and isinstance(result.exception(), SupersededError)

    @property
    def waits(self) -> bool:
        """Whether the engine has not begun with it."""
        return isinstance(self.result, ResultFuture) and not self.result.begun and not self.result.done()


class Flights:
    """A queue of them, from one thread to another. `most` may be in it, besides one that waits to begin.

    Attributes:
        superseded: how many have been replaced, by cause.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._flights: deque[InFlight] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.superseded: Counter[str] = Counter()

    def put(self, flight: InFlight) -> None:
        """Add the newest; waits while there are too many of which none is replaced."""
        with self._changed:
            self._flights.append(flight)
            self._drop_superseded()
            self._changed.notify_all()
            while len(self._flights) > self._most + 2 and not self._closed:  # one waits, one may be about to
                self._changed.wait()
                self._drop_superseded()

    def get(self) -> InFlight:
        """Take the oldest, waiting for one if there is none.

        Raises:
            QueueClosed: if the queue is closed and empty.
        """
        with self._changed:
            while not self._flights:
                if self._closed:
                    raise QueueClosed
                self._changed.wait()
            oldest = self._flights.popleft()
            self._changed.notify_all()
            return oldest

    @property
    def waits(self) -> bool:
        """Whether the newest one waits for the engine to begin with it."""
        with self._changed:
            return bool(self._flights) and self._flights[-1].waits

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _drop_superseded(self) -> None:
        kept: deque[InFlight] = deque()
        lost = 0
        for flight in self._flights:
            if flight.superseded:
                self.superseded[flight.replaced_as] += 1
                lost += 1 + flight.lost + flight.frame.dropped_before
            else:
                flight.lost += lost
                lost = 0
                kept.append(flight)
        self._flights = kept
