"""Executor for CPUs. Its streams are worker threads. Steps are not padded and not captured as graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from saccade.engine.config import MAX_PROMPT_TOKENS, EngineConfig
from saccade.engine.cpu.decoder import CpuPagedCache, CpuRunner
from saccade.engine.cpu.layers import product_dtype
from saccade.engine.cpu.threads import image_threads, one_thread, set_threads
from saccade.engine.errors import Fallbacks
from saccade.engine.image import Pixels, as_array
from saccade.engine.models.protocol import DraftingEncoder, ImageCrops, Model
from saccade.engine.runtime.executor import Executor, Sizes
from saccade.engine.runtime.streams import CpuStream


class CpuExecutor(Executor[ImageCrops]):
    """Executes the steps of a model on a CPU; see `Executor`.

    Args:
        model: the model.
        config: engine configuration.
        n_pages: number of KV cache pages.
        texts: whether the model supports text tasks in addition to object tasks.
    """

    def __init__(self, model: Model, config: EngineConfig, n_pages: int, *, texts: bool = True) -> None:
        products, fallbacks = product_dtype(model, config.exact), Fallbacks()
        with one_thread():
            self.cache = CpuPagedCache(model, n_pages, config.page_size)
            super().__init__(
                model,
                config,
                products,
                fallbacks,
                self.cache,
                CpuRunner(model, self.cache, config.exact, fallbacks),
                CpuImageEncoder(model, config.images_per_prefill),
                CpuStream("compute"),
                CpuStream("copy"),
                lambda _, work: work(),
                Sizes(range(config.max_sequences + 1), range(MAX_PROMPT_TOKENS + 1)),
                texts=texts,
            )

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        """See `Executor.call_when_ready`. The callback runs in the thread of the copy stream."""
        self._on_ready = callback
        return True


class CpuImageEncoder:
    """Encodes images on a CPU; see `executor.ImageEncoder`.

    Args:
        model: model with the vision encoder.
        most: maximum number of images per batch.
    """

    def __init__(self, model: Model, most: int) -> None:
        self._vision = self.encoder = model.vision
        self._threads = image_threads()
        self._drafting = model.vision if isinstance(model.vision, DraftingEncoder) else None
        self.batch_sizes = range(1, most + 1)
        self.tokens = torch.zeros(most, model.vision.n_tokens, model.limits.dim, dtype=model.dtype)
        self.objects = torch.zeros(most, 1 if self._drafting is None else self._drafting.n_drafts, 5)

    def prepare(self, image: Pixels) -> ImageCrops:
        """See `ImageEncoder.prepare`."""
        with one_thread():
            return self._vision.make_crops(as_array(image))

    def encode(self, slot: int, images: Sequence[ImageCrops]) -> None:
        """See `ImageEncoder.encode`.

        The number of threads set here also applies to the following prefill of the image prefixes.
        """
        if not images:
            return
        set_threads(self._threads.choose())
        begun, vision = time.perf_counter(), self._vision
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, image in enumerate(images):
            if image.tiling == (1, 1):
                alike.setdefault(image.pixels.shape[1:], []).append(number)
            else:
                features = vision.features(vision.normalize(torch.from_numpy(image.pixels)))
                self.tokens[number] = vision.join(features, image.tiling)
        for numbers in alike.values():  # single-crop images of equal shape are encoded together
            crops = vision.normalize(torch.from_numpy(np.concatenate([images[i].pixels[:1] for i in numbers])))
            if self._drafting is None:
                features = vision.features(crops)
            else:
                features, self.objects[numbers] = self._drafting.features_and_drafts(crops)
            self.tokens[numbers] = vision.project(features, features)
        self._threads.took((time.perf_counter() - begun) / sum(len(image.pixels) for image in images))

    def close(self) -> None:
        """Do nothing, because no work is in flight."""
