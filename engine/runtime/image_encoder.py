"""Image encoding on CUDA: upload, splitting into crops, and the vision encoder in CUDA graphs.

    upload stream    image → (YUV → RGB) → resize → crops
    compute stream   crops → features → image tokens

Images with a single crop are uploaded in batches (`CudaUploads`). Images with tiles are uploaded one by one
(`TiledUploads`), in the thread that submits them. A single-crop image that arrives while the device is idle is also
uploaded separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine import kernels
from saccade.engine.cuda.select import cuda_vision
from saccade.engine.errors import Fallbacks
from saccade.engine.image import Pixels, YuvImage, as_array
from saccade.engine.models.protocol import DraftingEncoder, Model, Tiling, VisionEncoder, crop_count
from saccade.engine.runtime.executor import part_of
from saccade.engine.runtime.graph_capture import Graphs, Job
from saccade.engine.runtime.step_inputs import bucket_of
from saccade.engine.runtime.uploads import CudaUploads, StagedImage, TiledImage, TiledUploads
from saccade.engine.tasks.task import Window

_BATCH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)  # batch sizes of single-crop images

PreparedImage = TiledImage | StagedImage
"""An image ready for encoding."""


class CudaImageEncoder:
    """Runs the vision encoder of a model on CUDA.

    `prepare` is thread-safe. The other methods must be called from one thread with one stream.

    Args:
        model: the model.
        most: maximum number of images per batch.
        depth: number of step slots.
        stream: CUDA stream of the encoder.
        graphs: CUDA graphs that run on `stream`.
        fallbacks: collects messages about slower implementations that are used.

    Attributes:
        idle: function that returns whether the device is probably idle.
        batch_sizes: batch sizes to which the number of images is padded.
        tokens: (images, tokens, dim) image tokens of the last `encode` call, in the order of its images.
        encoder: implementation of the vision encoder.
        objects: (images, objects, 5) detections, if the encoder is a `DraftingEncoder`. Other encoders have one unused
            entry.
    """

    def __init__(
        self,
        model: Model,
        most: int,
        depth: int,
        stream: torch.cuda.Stream,
        graphs: Graphs,
        fallbacks: Fallbacks,
    ) -> None:
        vision, device = model.vision, model.device
        self.idle: Callable[[], bool] = lambda: False
        self._stream = stream
        self._vision: VisionEncoder = vision
        self._device, self._kernels = device, kernels.available(device)
        self.encoder = cuda_vision(model, fallbacks)
        self._uploads = CudaUploads(device, depth, most, vision.crop_size, kernels=self._kernels)
        self._graphs = graphs

        def buffer(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.batch_sizes = [size for size in _BATCH_SIZES if size < most] + [most]
        most_crops, crop = max(most, vision.max_crops + 1), (vision.crop_size, vision.crop_size, 3)
        self._crops = buffer(most_crops, *crop, dtype=torch.uint8)
        cut_into = partial(cut_crops_into, margin=vision.crop_margin)
        self._tiled = TiledUploads(device, self._uploads.stream, (vision.max_crops + 1, *crop), cut_into)
        self._crop_features = buffer(most_crops, vision.n_tokens, vision.feature_dim)
        self._drafting = vision if isinstance(vision, DraftingEncoder) else None
        n_objects = 1 if self._drafting is None else self._drafting.n_drafts
        self.objects = buffer(most, n_objects, 5, dtype=torch.float32)
        self.tokens = buffer(most, vision.n_tokens, model.limits.dim)
        self._joined = torch.zeros_like(self.tokens[0])

    def prepare(self, image: Pixels, window: Window | None = None) -> PreparedImage:
        """Prepare an image for the vision encoder, without waiting for the device.

        Afterwards the caller may overwrite an image in host memory, but not an image in device memory.
        """
        vision = self._vision
        if self._kernels and isinstance(image, YuvImage) and image.y.is_cuda:
            if window is None:
                rows, columns, _ = image.shape
                window = Window(0, 0, columns, rows)
            if vision.tiling_of(window.height, window.width) == (1, 1):
                return self._uploads.stage_part(image, window)
        if window is not None:
            image = part_of(image, window)
        if not self._kernels:
            crops = vision.make_crops(as_array(image))
            return self._cut(crops.pixels, crops.tiling)
        rows, columns, _ = image.shape
        tiling = vision.tiling_of(rows, columns)
        prepared: PreparedImage | None = None
        single = tiling == (1, 1)
        # Upload it alone only if no other image is being uploaded, because this holds the GIL twice as long as staging.
        apart = not single or (self.idle() and self._tiled.all_free)
        if apart and not (isinstance(image, YuvImage) and image.y.is_cuda):
            prepared = self._tiled.send(image, tiling)
        if single and prepared is None:
            prepared = self._uploads.stage(image)
        return prepared or self._cut(image, tiling)

    @torch.inference_mode()
    def _cut(self, image: Pixels, tiling: Tiling) -> TiledImage:
        """Upload an image if it is in main memory, and split it into crops on the device.

        Without Triton, the image is split on the CPU.
        """
        vision = self._vision
        # Wait for the default stream, on which decoded frames are written and their memory is reused.
        on_device = isinstance(image, YuvImage) and image.y.is_cuda
        stream = torch.cuda.default_stream(self._device) if on_device else self._uploads.stream
        with torch.cuda.stream(stream):
            pixels = self._rgb(image) if isinstance(image, YuvImage) else self._upload(image)
            if self._kernels:
                pixels = cut_crops(pixels, tiling, vision.crop_size, vision.crop_margin)
            event = torch.cuda.Event()
            event.record(stream)
        return TiledImage(pixels, tiling, event)

    def _upload(self, array: NDArray[np.uint8]) -> torch.Tensor:
        pinned = torch.empty(array.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(pinned.numpy(), array)
        return pinned.to(self._device, non_blocking=True)

    def _rgb(self, image: YuvImage) -> torch.Tensor:
        from saccade.engine.kernels.resize import rgb_of_yuv

        here = image if image.y.is_cuda else image.to(self._device)
        return rgb_of_yuv(here.y, here.u, here.v, here.factors)

    def encode(self, slot: int, images: Sequence[PreparedImage]) -> None:
        """Encode images and write their tokens to `tokens`, on the current CUDA stream; see `ImageEncoder.encode`."""
        stream = self._stream
        single = [number for number, image in enumerate(images) if image.tiling == (1, 1)]
        staged: list[tuple[int, StagedImage]] = []
        loose: list[tuple[int, torch.Tensor]] = []
        for place, number in enumerate(single):
            image = images[number]
            if isinstance(image, StagedImage):
                staged.append((place, image))
            else:
                loose.append((place, image.pixels))
        for image in images:
            if isinstance(image, TiledImage):
                stream.wait_event(image.ready)
        count = len(single)
        if staged:
            stream.wait_event(self._uploads.cut(slot, staged, stream))
            self._crops[:count].copy_(self._uploads.crops[slot][:count])
        for place, pixels in loose:
            self._crops[place : place + 1].copy_(pixels)
        if single:  # single-crop images are encoded together
            self._graphs.run(*self._encode_job(bucket_of(self.batch_sizes, count), True))
            for place in range(count - 1, -1, -1):  # backwards, so that no source is overwritten before it is copied
                if single[place] != place:
                    self.tokens[single[place]].copy_(self.tokens[place])
        for number, image in enumerate(images):
            if isinstance(image, TiledImage) and image.tiling != (1, 1):
                count = len(image.pixels)
                self._crops[:count].copy_(image.pixels)
                self._graphs.run(*self._encode_job(count, False))
                self._graphs.run(("join", image.tiling), partial(self._join, image.tiling))
                self.tokens[number].copy_(self._joined)

    def jobs(self) -> list[Job]:
        """Return the jobs that capture CUDA graphs at startup, one for each batch size of single-crop images.

        Graphs for images with tiles are captured at first use.
        """
        return [self._encode_job(n, True) for n in self.batch_sizes]

    def _encode_job(self, n: int, single: bool) -> Job:
        return ("encode", n, single), partial(self._encode_crops, n, single)

    def close(self) -> None:
        """Wait for all image uploads in progress."""
        self._tiled.close()
        self._uploads.close()

    def _encode_crops(self, n: int, single: bool) -> None:
        crops = self._vision.normalize(self._crops[:n])
        if self._drafting is None:
            features = self.encoder.features(crops)
        else:  # such an encoder has one crop per image
            features, self.objects[:n] = self._drafting.features_and_drafts(crops)
        if single:
            self.tokens[:n] = self.encoder.project(features, features)
        else:
            self._crop_features[:n] = features

    def _join(self, tiling: Tiling) -> None:
        """Compute the image tokens from the features of all crops of an image with tiles."""
        self._joined[:] = self._vision.join(self._crop_features[: crop_count(tiling)], tiling)


def cut_crops(image: torch.Tensor, tiling: Tiling, size: int, margin: int) -> torch.Tensor:
    """Split an image into crops on the GPU. The crops are equal to those of `make_crops`.

    The first crop is the whole image. Unless the tiling is 1×1, the tiles follow in row-major order.

    Args:
        image: (height, width, 3) uint8 RGB on a CUDA device.
        tiling: number of tiles (rows, columns).
        size: side of a crop in pixels.
        margin: overlap of tiles on each side, in pixels.

    Returns:
        (n, size, size, 3) uint8.
    """
    out = image.new_empty(crop_count(tiling), size, size, 3)
    cut_crops_into(image, tiling, out, margin)
    return out


def cut_crops_into(image: torch.Tensor, tiling: Tiling, out: torch.Tensor, margin: int) -> list[torch.Tensor]:
    """Split an image into crops on the GPU and write them to `out`; see `cut_crops`.

    Returns:
        Temporary tensors that the kernels read. A CUDA graph of this call must keep them alive.
    """
    from saccade.engine.kernels.resize import resize, weights_of

    (height, width, _), size, device = image.shape, out.shape[1], image.device
    out[0] = resize(image, size, size)
    read = weights_of(height, width, size, size, device)
    if tiling != (1, 1):
        rows, columns = tiling
        window = size - 2 * margin
        whole = rows * window + 2 * margin, columns * window + 2 * margin
        large = resize(image, *whole)
        tiles = large.unfold(0, size, window).unfold(1, size, window).permute(0, 1, 3, 4, 2)
        out[1:].view(tiles.shape)[:] = tiles
        read += weights_of(height, width, *whole, device)
    return read
