"""Executor for CPUs. Its streams are worker threads. Batches are not padded, and CUDA graphs are not used."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from saccade.engine.config import GRAPH_PROMPT_TOKENS, EngineConfig
from saccade.engine.cpu.decoder import CpuPagedCache, CpuRunner
from saccade.engine.cpu.layers import product_dtype
from saccade.engine.cpu.threads import image_threads, one_thread, set_threads
from saccade.engine.errors import Fallbacks
from saccade.engine.image import Pixels, as_array
from saccade.engine.models.protocol import DraftingEncoder, ImageCrops, Model
from saccade.engine.runtime.executor import Executor, Sizes, part_of
from saccade.engine.runtime.streams import Event, Watcher
from saccade.engine.tasks.task import Window


class CpuExecutor(Executor[ImageCrops]):
    """Executes the prefill and decode steps of a model on a CPU; see `Executor`.

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
                Sizes(range(config.max_sequences + 1), range(GRAPH_PROMPT_TOKENS + 1)),
                texts=texts,
            )

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        """Register a callback for completed steps; see `Executor.call_when_ready`. Return True (supported).

        The worker thread of the copy stream calls the callback.
        """
        self._on_ready = callback
        return True


class CpuImageEncoder:
    """Runs the vision encoder on a CPU; see `executor.ImageEncoder`.

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

    def prepare(self, image: Pixels, window: Window | None = None) -> ImageCrops:
        """Split an image, or a part of it (`window`), into crops on the CPU; see `ImageEncoder.prepare`."""
        with one_thread():
            return self._vision.make_crops(as_array(image if window is None else part_of(image, window)))

    def encode(self, slot: int, images: Sequence[ImageCrops]) -> None:
        """Encode images and write their tokens to `tokens`; see `ImageEncoder.encode`.

        The call sets PyTorch's thread count for the encoder and for the prefill that follows.
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
        """Have no effect: a CPU encoder has no resources to release."""


# ---- streams


class _CpuEvent:
    __slots__ = ("error", "reached")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error


class CpuStream:
    """CPU counterpart of a CUDA stream: runs submitted work in order, in a worker thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Error of the work since the last event; only the worker thread accesses it.
        self._error: BaseException | None = None
        self._watcher: Watcher | None = None
        self._thread = threading.Thread(target=self._run, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Submit work. After an error, work is skipped until the next event. Waiting for the event raises the error."""
        watcher = self._watcher
        self._work.put(work if watcher is None else _watched(work, watcher))

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """Return a new event that completes when all work submitted so far has run; see `Stream.record`."""
        event = _CpuEvent()

        def reach() -> None:
            event.error, self._error = self._error, None
            event.reached.set()
            if reached is not None:
                reached()

        self._work.put(_always(reach))
        return event

    def wait(self, event: Event) -> None:
        """Make later work wait for an event of another `CpuStream`. Skip it if the work before the event failed."""

        def wait() -> None:
            try:
                event.synchronize()
            except BaseException as error:
                self._error = self._error or error

        self._work.put(_always(wait))

    def watch(self, watcher: Watcher | None) -> None:
        """Let `watcher` record the times of work submitted from now on. The worker thread calls `watcher`."""
        self._watcher = watcher

    def settle(self, *, wait: bool = False) -> None:
        """If `wait` is True, wait for all submitted work. The worker thread reports finished work by itself."""
        if wait and self._thread.is_alive():
            reached = threading.Event()
            self._work.put(_always(reached.set))
            while not reached.wait(0.1) and self._thread.is_alive():
                pass

    def close(self) -> None:
        """Run all submitted work, then end the worker thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is None or getattr(work, "always", False):
                try:
                    work()
                except BaseException as error:  # the next event raises it
                    self._error = error


def _always(work: Callable[[], None]) -> Callable[[], None]:
    """Mark a function that the stream must run even after an error of earlier work."""

    def marked() -> None:
        work()

    marked.always = True  # type: ignore[attr-defined]
    return marked


def _watched(work: Callable[[], None], watcher: Watcher) -> Callable[[], None]:
    about = watcher.about()

    def watched() -> None:
        start = time.perf_counter()
        try:
            work()
        finally:
            watcher.ran(about, start, time.perf_counter())

    return watched
