"""Measures the time of decode steps and sampling on an otherwise idle GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from saccade.engine import Engine, EngineError
from saccade.engine.models.protocol import Phase
from saccade.engine.runtime.cuda_executor import CudaExecutor
from saccade.engine.runtime.executor import COORDS
from saccade.engine.runtime.step_inputs import bucket_of


def time_step(engine: Engine, rows: int, position: int, repeats: int = 100) -> list[float]:
    """Return the GPU times of decode steps that sample coordinates, in seconds.

    Args:
        engine: an idle engine on CUDA.
        rows: batch size: number of sequences per step.
        position: position of the decoded token in each sequence.
        repeats: number of steps.

    Raises:
        EngineError: if the engine is on a CPU or not idle.
    """
    return engine.run_idle(lambda executor: _step(_cuda(executor), rows, position, repeats))


def time_sampling(engine: Engine, rows: int) -> float:
    """Return the median GPU time of coordinate sampling for `rows` sequences, in seconds.

    Raises:
        EngineError: if the engine is on a CPU or not idle.
    """
    return engine.run_idle(lambda executor: _sampling(_cuda(executor), rows))


def experts_used(engine: Engine, rows: int) -> float | None:
    """Return how many experts the last step used per layer (mean), or None if the model has no experts.

    Raises:
        EngineError: if the engine is on a CPU or not idle.
    """
    return engine.run_idle(lambda executor: _experts(_cuda(executor), rows))


def _cuda(executor: Any) -> CudaExecutor:
    if not isinstance(executor, CudaExecutor):
        raise EngineError("this benchmark needs a GPU; use `saccade bench frame` on a CPU")
    return executor


def _times(
    executor: CudaExecutor, work: Callable[[], object], repeats: int, begin_with: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the GPU time of each repetition of `work` in seconds, without the warm-up. The GPU must be otherwise idle.

    Args:
        executor: executor whose compute stream is used.
        work: function to time.
        repeats: number of repetitions.
        begin_with: function called before each repetition, not included in the time.
    """
    pairs, stream = [], executor._compute.stream
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        for _ in range(repeats + 5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin_with()
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
    torch.cuda.synchronize(stream.device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs[5:]]


@torch.inference_mode()
def _step(executor: CudaExecutor, rows: int, position: int, repeats: int) -> list[float]:
    cache, device = executor.cache, executor.model.device
    bucket = bucket_of(executor._sizes.batch, rows)
    own = -(-(position + 1 + cache.gap) // cache.page_size)
    pages = torch.arange(bucket * own, dtype=torch.int32, device=device) % (cache.n_pages - 1) + 1
    executor._tables[:bucket, :own] = pages.view(bucket, own)
    host = executor._steps.host[0]
    for name in ("batch_slots", "outs"):
        host[name][:bucket] = np.arange(bucket)
    host["phases"].fill(Phase.X_OR_EOS)
    host["positions"].fill(position)
    # Rows that differ, as a step's do: with experts, how many are read depends on it.
    states = torch.randn_like(executor._state[:bucket])
    job = executor._decode_job(executor._slots[0], bucket, COORDS)
    times = _times(executor, lambda: executor.graphs.run(*job), repeats, lambda: executor._state[:bucket].copy_(states))
    executor._tables.zero_()
    torch.cuda.synchronize(device)  # not on the compute stream: the next prefill must not come before it
    return times


@torch.inference_mode()
def _sampling(executor: CudaExecutor, rows: int) -> float:
    executor._steps.device["outs"].fill_(executor._spare)
    executor._steps.device["phases"].fill_(Phase.X_OR_EOS)
    job = executor._first_job(executor._slots[0], bucket_of(executor._sizes.batch, rows), COORDS)
    return float(np.median(_times(executor, lambda: executor.graphs.run(*job), 100)))


def _experts(executor: CudaExecutor, rows: int) -> float | None:
    from saccade.engine.cuda.decoder import PackedRunner  # needs Triton

    runner = executor._runner
    if not isinstance(runner, PackedRunner) or not runner._blocks.top:
        return None
    bucket, top = bucket_of(executor._sizes.batch, rows), runner._blocks.top
    layers = [layer.number for layer in runner._blocks.layers if layer.experts is not None]
    used = [len(runner._logits[number, :bucket].topk(top).indices.unique()) for number in layers]
    return sum(used) / len(used)
