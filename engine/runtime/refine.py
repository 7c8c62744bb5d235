"""Refinement of segmentation outlines by the model's refiner network, in a separate thread.

    crop around the box (enlarged by a quarter on each side) → features → mask, improved in five iterations → path

On CUDA, the network is one CUDA graph on its own stream. If the refinement of a result fails, the result contains the
coarse outlines.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from saccade.engine.cpu.threads import set_threads, step_threads
from saccade.engine.errors import Fallbacks, reason_of
from saccade.engine.image import Pixels, as_array
from saccade.engine.models.protocol import DeepEncoder, Refiner, VisionEncoder
from saccade.engine.outline import Mask, draw, fill
from saccade.engine.results import Outline, Result
from saccade.engine.runtime.graph_capture import Graphs

_WIDER = 0.25  # fraction of the box added on each side
_SMALLEST = 0.0015  # fraction of the image; smaller holes and islands are dropped
log = logging.getLogger(__name__)

Done = Callable[[Result], None]


class RefineThread:
    """Thread that refines the segmentation outlines in results. Thread-safe.

    Args:
        refiner: the refiner network, on the device.
        vision: vision encoder that splits and normalizes crops.
        encoder: vision encoder that computes the features of crops; may be a faster implementation.
        device: device of the refiner and the encoder.
        fallbacks: receives a note if memory is too low for a CUDA graph.
    """

    def __init__(
        self, refiner: Refiner, vision: VisionEncoder, encoder: DeepEncoder, device: torch.device, fallbacks: Fallbacks
    ) -> None:
        self._refiner, self._vision, self._encoder, self._size = refiner, vision, encoder, vision.crop_size
        self._pixels = torch.zeros(1, self._size, self._size, 3, dtype=torch.uint8, device=device)
        self._mask = torch.zeros(self._size, self._size, device=device)
        self._stream, self._graphs = None, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._graphs = Graphs(self._stream, fallbacks)
        self._queue: SimpleQueue[tuple[Result, Pixels, Done] | None] = SimpleQueue()
        self._lock, self._over, self._warned = threading.Lock(), False, False
        if self._graphs is not None:
            # Warm up: compile and capture before the first result.
            self._probabilities(self._pixels.cpu(), self._mask.cpu())
        self._thread = threading.Thread(target=self._run, name="saccade-refine", daemon=True)
        self._thread.start()

    def put(self, result: Result, pixels: Pixels, done: Done) -> None:
        """Queue a result and its image for refinement. `done` is called with the refined result."""
        with self._lock:
            if not self._over:
                self._queue.put((result, pixels, done))
                return
        done(result)

    def stop(self) -> None:
        """Tell the thread to end when it has processed all queued results. Does not wait for the thread."""
        with self._lock:
            self._over = True
            self._queue.put(None)

    def close(self) -> None:
        """Stop the thread after all queued results have been processed, and wait for it."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        set_threads(step_threads())
        while (item := self._queue.get()) is not None:
            result, pixels, done = item
            try:
                result = refined(result, as_array(pixels), self._better)
            except Exception as error:  # this result keeps its coarse outlines
                if not self._warned:
                    log.warning("the mask refiner failed, so segmentation masks stay coarse: %s", reason_of(error))
                self._warned = True
            done(result)
            del item, result, pixels, done  # otherwise the image would stay alive until the next result

    @torch.inference_mode()
    def _better(self, crop: NDArray[np.uint8], mask: Mask) -> Mask:
        """Return a refined mask of the object in a crop.

        Args:
            crop: (height, width, 3) uint8 RGB.
            mask: (height, width) coarse mask.
        """
        size, given = (self._size, self._size), torch.from_numpy(crop.copy()).permute(2, 0, 1)
        scaled = F.interpolate(given[None].float(), size, mode="bilinear").round_().to(torch.uint8)
        # Nearest-neighbour interpolation.
        coarse = F.interpolate(torch.from_numpy(mask).float()[None, None], size)[0, 0]
        found = self._probabilities(scaled.permute(0, 2, 3, 1), coarse)
        better: Mask = (F.interpolate(found[None, None], mask.shape, mode="bilinear")[0, 0] > 0.5).numpy()
        return better

    @torch.inference_mode()
    def _probabilities(self, pixels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return for each pixel of a resized crop the probability that it belongs to the object.

        The call waits for the device. The result is in main memory.
        """
        self._pixels.copy_(pixels)
        if self._stream is None or self._graphs is None:
            self._mask.copy_(mask)
            self._work()
            return self._mask
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            self._mask.copy_(mask)
            self._graphs.run("refine", partial(self._work))
            self._stream.synchronize()
            return self._mask.cpu()

    def _work(self) -> None:
        crops = self._vision.normalize(self._pixels)
        self._mask.copy_(self._refiner(*self._encoder.two_depths(crops, self._refiner.early_block), self._mask))


def refined(result: Result, image: NDArray[np.uint8], better: Callable[[NDArray[np.uint8], Mask], Mask]) -> Result:
    """Return a copy of a result with refined segmentation outlines.

    Args:
        result: result of the image.
        image: (height, width, 3) uint8 RGB.
        better: function that refines a mask. Its arguments are a crop (height, width, 3) and its mask (height, width).
    """
    parts = tuple(
        _redrawn(one, image, better) if isinstance(one, Outline) else one for one in result.extras.get(Outline.key, ())
    )
    return replace(result, extras={**result.extras, Outline.key: parts})


def _redrawn(outline: Outline, image: NDArray[np.uint8], better: Callable[[NDArray[np.uint8], Mask], Mask]) -> Outline:
    """Return the outline after mask refinement. If the refined mask is empty, return the outline unchanged."""
    height, width = image.shape[:2]
    x1, y1, x2, y2 = outline.box
    wider, higher = _WIDER * (x2 - x1), _WIDER * (y2 - y1)
    left, top = max(0, math.floor((x1 - wider) * width)), max(0, math.floor((y1 - higher) * height))
    right, bottom = min(width, math.ceil((x2 + wider) * width)), min(height, math.ceil((y2 + higher) * height))
    across, down = right - left, bottom - top
    if across < 1 or down < 1:
        return outline
    coarse = fill(
        [(ring * (width, height) - (left, top)) / (across, down) for ring in outline.polygons()], across, down
    )
    mask = better(image[top:bottom, left:right], coarse) if coarse.any() else coarse
    if not mask.any():
        return outline
    path, (x1, y1, x2, y2) = draw(mask, _SMALLEST * width * height)
    corners = (
        (left + x1 * across) / width,
        (top + y1 * down) / height,
        (left + x2 * across) / width,
        (top + y2 * down) / height,
    )
    return replace(outline, path=path, box=corners, refined=True)
