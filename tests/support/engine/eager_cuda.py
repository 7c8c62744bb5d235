"""The executor for CUDA on a CPU: its graphs are calls, its streams are in order. What it computes is real.

Nothing of time or of order is: that is for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from saccade.engine import Engine
from saccade.engine.config import EngineConfig
from saccade.engine.model_loader import step_loop
from saccade.engine.models.protocol import DraftingEncoder, Model
from saccade.engine.runtime.cuda_executor import CudaExecutor
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.loop import StepLoop

_PAGES = 2048


class Now:
    """A stream or an event: what is put on it has run."""

    capturing = False  # what a capture has run before it is nothing that anybody reads

    def __init__(self, *_: object, **__: object) -> None:
        self.stream = self
        self.device = torch.device("cpu")

    def run(self, work: Callable[[], None]) -> None:
        if not self.capturing:
            work()

    def record(self, *_: object) -> Now:
        return self

    def query(self) -> bool:
        return True

    def nothing(self, *_: object, **__: object) -> None: ...

    wait = wait_event = wait_stream = synchronize = watch = settle = close = nothing


class _Call:
    """A graph that is captured by keeping what it runs."""

    def __init__(self, work: Callable[[], None], _: object) -> None:
        self.replay = torch.inference_mode()(work)


def pageable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes tensors, without pinned memory."""
    return lambda *args, pin_memory=False, **options: make(*args, **options)


@contextmanager
def eager_cuda_engine(name: str, config: EngineConfig) -> Iterator[Engine]:
    """A model in float32 on such an executor."""

    def start(model: Model, config: EngineConfig, *, texts: bool, **_: object) -> tuple[Executor[Any], StepLoop[Any]]:
        with mock.patch.object(Now, "capturing", True):
            executor = CudaExecutor(model, config, _PAGES, texts=texts)
        drafting = config.drafts and isinstance(model.vision, DraftingEncoder)
        loop = step_loop(executor, model, config, _PAGES, 2, from_images=drafting)
        return executor, loop

    here = "saccade.engine.runtime.cuda_executor"
    replaced: dict[str, object] = {
        **{f"torch.{make}": pageable(getattr(torch, make)) for make in ("zeros", "empty", "tensor")},
        **{f"torch.cuda.{name}": Now for name in ("Stream", "Event", "current_stream")},
        **{f"torch.cuda.{name}": lambda *_: None for name in ("synchronize", "graph_pool_handle")},
        "torch.cuda.stream": nullcontext,
        "saccade.engine.kernels.available": lambda _: False,
        f"{here}.CudaStream": Now,
        "saccade.engine.runtime.graph_capture.captured": _Call,
        "saccade.engine.api.start": start,
    }
    with Engine.load(name, "cpu", "float32") as loaded, ExitStack() as stack:
        for place, stand_in in replaced.items():
            stack.enter_context(mock.patch(place, stand_in))
        info, vocabulary = loaded.model, loaded._vocabulary
        with Engine(loaded._loaded, info, vocabulary, config) as engine:
            yield engine
