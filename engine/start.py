"""From a model and sizes to an executor on the model's device, and the loop that runs its steps. Knows no requests."""

from __future__ import annotations

from typing import Any

import torch

from saccade.engine.backends.paged_cache import pages_for
from saccade.engine.backends.quantization import supports_fp8
from saccade.engine.config import EngineConfig
from saccade.engine.core.kv_pages import PagePool
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.errors import EngineError
from saccade.engine.models.protocol import DraftingEncoder, Model
from saccade.engine.process import keep_freed_memory, silence_tracer
from saccade.engine.runtime.cpu_executor import CpuExecutor
from saccade.engine.runtime.executor import Executor, Progress
from saccade.engine.runtime.loop import StepLoop

_GPU_PREPARERS = 4  # threads that copy images for the upload: one copies 4K frames at 6 ms each


def start(
    model: Model, config: EngineConfig, *, texts: bool, progress: Progress | None = None
) -> tuple[Executor[Any], StepLoop[Any]]:
    """Allocate what a model needs to run, and start the thread that runs it.

    Args:
        model: on its device.
        config: sizes.
        texts: whether it is asked for text.
        progress: called while a GPU is prepared.

    Raises:
        EngineError: if the device cannot keep keys and values as the configuration wants it.
    """
    if config.kv_dtype is not None and not (model.device.type == "cuda" and supports_fp8(model.device)):
        raise EngineError(f"kv_dtype {config.kv_dtype} needs a GPU from Ada on: leave it out on {model.device}")
    n_pages = config.n_pages or pages_for(model, config.page_size, config.max_sequences, config.kv_dtype)
    executor: Executor[Any]
    if model.device.type == "cuda":
        from saccade.engine.runtime.cuda_executor import CudaExecutor

        executor = CudaExecutor(model, config, n_pages, texts=texts, progress=progress)
        torch.cuda.empty_cache()  # what held weights before they were packed
        together, preparers = config.images_per_prefill, _GPU_PREPARERS
    else:
        keep_freed_memory()
        silence_tracer()
        executor = CpuExecutor(model, config, n_pages)
        together = preparers = 1  # on a CPU a batch of images is no faster than one by one
    from_images = config.drafts and isinstance(model.vision, DraftingEncoder)
    loop = step_loop(executor, model, config, n_pages, together, preparers, from_images=from_images)
    loop.monitor.attach(executor.streams)
    return executor, loop


def step_loop(
    executor: Executor[Any],
    model: Model,
    config: EngineConfig,
    n_pages: int,
    images: int,
    preparers: int,
    *,
    from_images: bool,
) -> StepLoop[Any]:
    """The loop of an executor, and its scheduler.

    Args:
        executor: with so many pages.
        model: what it runs.
        config: sizes.
        n_pages: of the cache.
        images: most of a prefill.
        preparers: threads that prepare images.
        from_images: whether the executor drafts answers.
    """
    pool = PagePool(n_pages)
    pool.allocate(1)  # page 0 is where the executor writes what is never read
    scheduler: Scheduler[Any] = Scheduler(
        pool,
        config.page_size,
        model.limits.prefix_length,
        config.max_sequences,
        images,
        config.adapter_slots,
        drafts=config.drafts,
        from_images=from_images,
        drafted_tokens=config.drafted_tokens,
    )
    return StepLoop(executor, scheduler, config.depth, preparers)
