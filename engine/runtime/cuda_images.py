"""Pictures on CUDA: brought there and cut into crops by whoever submits them, seen by the vision tower in graphs.

    uploads (own stream, submitting thread)   frame → resize → crops
    compute stream                            crops → tower → image tokens

Knows nothing of prompts, steps or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from saccade.engine.models.moondream.image_crops import make_crops, normalise, stitch, tiling_of
from saccade.engine.models.moondream.model import Moondream

PICTURES = (1, 2, 4, 8)  # that are a single crop each go through the tower together, padded to the next of these

Graphs = dict[Hashable, torch.cuda.CUDAGraph]
Job = tuple[Graphs, Hashable, Callable[[], None]]
"""A graph to be captured: where it goes, under which key, and what it does."""


@dataclass(slots=True, frozen=True)
class Picture:
    """Crops (n, size, size, 3) uint8 on the device, ready behind the event; a 1×1 tiling has the global one only."""

    crops: torch.Tensor
    tiling: tuple[int, int]
    ready: torch.cuda.Event


class PictureReader:
    """One model's eyes. `prepare` may be called by any thread, the rest by one, on one stream.

    Args:
        model: the model.
        kernels: whether ours can run on the device.

    Attributes:
        images: (PICTURES[-1], tokens, dim) image tokens of the pictures that `look` was called for, in order.
    """

    def __init__(self, model: Moondream, kernels: bool) -> None:
        vision, device = model.config.vision, model.device
        self._model, self._kernels = model, kernels
        self._features: Callable[[torch.Tensor], torch.Tensor] = model.vision.features
        if kernels:
            from saccade.engine.backends import packed_vision as tower

            if tower.fits(model):
                self._features = tower.PackedTower(model).features
        self._uploads = torch.cuda.Stream(device)
        self._towers: Graphs = {}
        self._joins: Graphs = {}

        def kept(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        most = max(PICTURES[-1], vision.max_crops + 1)
        self._crops = kept(most, vision.crop_size, vision.crop_size, 3, dtype=torch.uint8)
        self._seen = kept(most, vision.n_tokens, vision.enc_dim)
        self.images = kept(PICTURES[-1], vision.n_tokens, model.config.text.dim)
        self._projected = torch.zeros_like(self.images)

    @torch.inference_mode()
    def prepare(self, view: NDArray[np.uint8]) -> Picture:
        """Bring a picture (height, width, 3) uint8 RGB to the device and cut it into crops there; does not wait."""
        config = self._model.config.vision
        tiling = tiling_of(view.shape[0], view.shape[1], config)
        sent = view
        if not self._kernels:
            sent = make_crops(view, config)[0]
            sent = sent[:1] if tiling == (1, 1) else sent
        pinned = torch.empty(sent.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(pinned.numpy(), sent)
        with torch.cuda.stream(self._uploads):
            crops = pinned.to(self._model.device, non_blocking=True)
            if self._kernels:
                from saccade.engine.runtime.cuda_crops import cut

                crops = cut(crops, tiling, config)
            event = torch.cuda.Event()
            event.record(self._uploads)
        return Picture(crops, tiling, event)

    def look(self, pictures: Sequence[Picture], stream: torch.cuda.Stream) -> None:
        """Put the image tokens of pictures, PICTURES[-1] at most, into `images`; on `stream`, which is the current one.

        The pictures must be kept until that has run.
        """
        for picture in pictures:
            stream.wait_event(picture.ready)
        plain = [number for number, picture in enumerate(pictures) if picture.tiling == (1, 1)]
        if plain:  # the tower runs once over all pictures that are a single crop
            for place, number in enumerate(plain):
                self._crops[place].copy_(pictures[number].crops[0])
            self._towers[bucket_of(PICTURES, len(plain)), True].replay()
            for place, number in enumerate(plain):
                self.images[number].copy_(self._projected[place])
        for number, picture in enumerate(pictures):
            if picture.tiling != (1, 1):
                count = len(picture.crops)
                self._crops[:count].copy_(picture.crops)
                self._towers[count, False].replay()
                self._joins[picture.tiling].replay()
                self.images[number].copy_(self._projected[0])

    def jobs(self) -> list[Job]:
        """What is to be captured before the first `look`."""
        tiles = self._model.config.vision.max_crops
        tilings = [(rows, columns) for rows in range(1, tiles + 1) for columns in range(1, tiles // rows + 1)][1:]
        counts = sorted({1 + rows * columns for rows, columns in tilings})
        towers = [*((n, True) for n in PICTURES), *((n, False) for n in counts)]
        jobs: list[Job] = [(self._towers, key, partial(self._see, *key)) for key in towers]
        return jobs + [(self._joins, tiling, partial(self._join, tiling)) for tiling in tilings]

    def close(self) -> None:
        """Wait for what is on the way."""
        self._uploads.synchronize()

    def _see(self, n: int, plain: bool) -> None:
        features = self._features(normalise(self._crops[:n], self._model.dtype))
        if plain:
            self._projected[:n] = self._model.vision.project(features, features)
        else:
            self._seen[:n] = features

    def _join(self, tiling: tuple[int, int]) -> None:
        """Image tokens from the features of a picture's crops, as `VisionTower.forward` joins them."""
        config, features = self._model.config.vision, self._seen[: 1 + tiling[0] * tiling[1]]
        tiles = features[1:].view(-1, config.grid, config.grid, features.shape[-1])
        stitched = stitch(tiles, tiling, config.overlap_margin).permute(2, 0, 1)
        pooled = F.adaptive_avg_pool2d(stitched, (config.grid, config.grid)).flatten(1).t()
        self._projected[0] = self._model.vision.project(features[0], pooled)


def bucket_of(sizes: Sequence[int], count: int) -> int:
    """The size that so many are padded to."""
    return next(size for size in sizes if size >= count)
