"""Connects a stream to the engine: submits its frames, and keeps a queue of the unfinished frames.

With the policy `newest`, a new frame replaces a frame that the engine has not started.
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
from saccade.engine.results import Result, ResultFuture
from saccade.engine.tasks.task import Task, Window
from saccade.pipeline.analytics.saccades.stage import SaccadeSettings
from saccade.pipeline.config import ShareSettings, StreamConfig
from saccade.pipeline.runtime.bounded_queue import QueueClosed
from saccade.sources import Frame, YuvPlanes

if TYPE_CHECKING:
    from saccade.engine import Engine, Image
    from saccade.engine.image import YuvImage


_WATCHED = 4.0  # factor on the weight of a watched stream


def saccades_of(settings: StreamConfig) -> SaccadeSettings:
    """Return the settings of the `SaccadeStage` from the configuration of a stream."""
    return SaccadeSettings(settings.most_saccades, settings.saccade_sweep, settings.max_fps, settings.motion_mask)


class EngineStream:
    """Submits the frames of one stream to the engine. `share` can be set from any thread.

    Args:
        engine: the engine.
        name: name of the stream.
        in_flight: maximum number of unfinished frames in the engine.
        share: scheduling settings. Frame rate and deadline apply to live streams only.
        live: whether the source is live.
        newest: whether a new frame replaces a frame that the engine has not started.
        gpu: index of the engine's GPU; None for a CPU. Frames in the memory of this GPU are not copied.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        in_flight: int,
        share: ShareSettings,
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
        self._begun_at = -math.inf  # submission time of the newest frame that the engine has started

    def update(self, share: ShareSettings) -> None:
        """Apply new scheduling settings."""
        self._share = share
        self.configure()

    def watch(self, watched: bool) -> None:
        """Set whether the stream has viewers, which raises its scheduling weight."""
        if watched != self._watched:
            self._watched = watched
            self.configure()

    def configure(self) -> None:
        """Send the scheduling settings of the stream to the engine."""
        weight = self._share.weight * (_WATCHED if self._watched else 1)
        rate = self._share.max_fps if self._live else None
        self._engine.configure_stream(self._key, StreamSettings(weight, rate, self._in_flight, self._newest))

    def submit(
        self, frame: Frame, tasks: Sequence[Task], tiles: int, now: float, windows: Sequence[Window] = ()
    ) -> ResultFuture:
        """Submit a frame to the engine. `now` is the current time by `time.monotonic()`, in seconds.

        Errors are the same as for `Engine.submit`.
        """
        limit_ms, left_s = self._share.deadline_ms, None
        if limit_ms is not None and self._live:
            left_s = (limit_ms - frame.decode_ms) / 1e3 - (now - frame.decoded_at)
        # Tiles are cut from the RGB image.
        later = partial(_image_of, frame, self._gpu if tiles == 1 else None)
        image = later if self._newest else later()
        self._note_begun()
        result = self._engine.submit(image, tasks, tiles, deadline_s=left_s, stream=self._key, windows=windows)
        self._newest_submitted = result, now
        return result

    def beyond_rate(self, now: float) -> bool:
        """Return whether processing another frame at time `now` would exceed the maximum frame rate `max_fps`.

        Args:
            now: current time by `time.monotonic()`, in seconds.
        """
        self._note_begun()
        rate = self._share.max_fps if self._live else None
        return rate is not None and now < self._begun_at + 1 / rate

    def _note_begun(self) -> None:
        if self._newest_submitted is not None and self._newest_submitted[0].begun:
            self._begun_at = self._newest_submitted[1]

    def close(self) -> None:
        """Remove the stream from the engine."""
        self._engine.forget_stream(self._key)


def _image_of(frame: Frame, gpu: int | None) -> Image:
    """Return the image of a frame: the YUV planes if they are in the memory of the engine's GPU, otherwise RGB."""
    planes = frame.planes() if gpu is not None and frame.planes is not None else None
    return frame.image if planes is None or planes.gpu not in (None, gpu) else yuv_image(planes)


def yuv_image(planes: YuvPlanes) -> YuvImage:
    """Convert the decoder's YUV planes to an engine image without copying. The image keeps the planes allocated."""
    import torch  # already loaded by the engine

    from saccade.engine.image import YuvImage

    # Pass the DLPack capsule instead of the plane: torch would pass a CUDA stream to the plane, which PyAV rejects.
    y, *chroma = (torch.utils.dlpack.from_dlpack(plane.__dlpack__()) for plane in planes.planes)
    u, v = chroma if len(chroma) == 2 else chroma[0].unbind(-1)
    return YuvImage(y, u, v, planes.matrix, planes.full_range)


@dataclass(slots=True)
class InFlight:
    """A frame that was submitted to the engine and whose result has not been collected yet.

    Attributes:
        frame: the frame.
        submitted_at: time of the submission by `time.monotonic()`, in seconds.
        result: future of the result.
        replaced_as: cause of the drop if a newer frame replaces this frame, see `Report.drops`.
        lost: number of earlier unfinished frames that this frame replaced.
    """

    frame: Frame
    submitted_at: float
    result: Future[Result]
    replaced_as: str = "full"
    lost: int = 0

    @property
    def superseded(self) -> bool:
        """Whether a newer frame has replaced this frame."""
        result = self.result
        return result.done() and not result.cancelled() and isinstance(result.exception(), SupersededError)

    @property
    def waits(self) -> bool:
        """Whether the engine has not yet started to process this frame."""
        return isinstance(self.result, ResultFuture) and not self.result.begun and not self.result.done()


class InFlightQueue:
    """A queue of the frames that were submitted to the engine, oldest first.

    Args:
        most: maximum number of frames that the engine processes at once.

    Attributes:
        superseded: number of frames that a newer frame replaced, by cause.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._flights: deque[InFlight] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.superseded: Counter[str] = Counter()

    def put(self, flight: InFlight) -> None:
        """Add a frame, and remove the older frames that it replaces."""
        with self._lock:
            self._flights.append(flight)
            if len(self._flights) > 1:
                self._drop_superseded()

    def take(self) -> InFlight | None:
        """Remove and return the oldest frame if its result is ready. Otherwise return None.

        Raises:
            QueueClosed: if no frames are left and the queue is closed.
        """
        with self._lock:
            if not self._flights:
                if self._closed:
                    raise QueueClosed
                return None
            return self._flights.popleft() if self._flights[0].result.done() else None

    @property
    def full(self) -> bool:
        """Whether the next frame must wait, because the engine has the maximum number of frames."""
        with self._lock:
            # Besides `most` frames, one frame waits, and another one may arrive.
            return len(self._flights) >= self._most + 2 and not self._flights[-1].waits

    @property
    def waits(self) -> bool:
        """Whether the newest frame still waits for the engine."""
        with self._lock:
            return bool(self._flights) and self._flights[-1].waits

    @property
    def waiting_since(self) -> float | None:
        """Submission time of the oldest unfinished frame (`time.monotonic()`), or None if every frame has a result."""
        with self._lock:
            return next((flight.submitted_at for flight in self._flights if not flight.result.done()), None)

    def cancel(self) -> None:
        """Cancel all frames that the engine has not finished."""
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            flight.result.cancel()

    def close(self) -> None:
        """Close the queue for new frames."""
        with self._lock:
            self._closed = True

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
