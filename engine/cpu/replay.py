"""Functions of tensors that are recorded once and then replayed by torch's own interpreter, without Python.

On a CPU nano's detector is some 400 operations, 12 ms, of which Python takes 2. A record (`torch.jit.trace`, its
optimizations off) does the same operations on the same numbers. Knows no models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from saccade.engine.fallbacks import Fallbacks, reason_of

RECORDED_AFTER = 16  # calls: the first lays weights out; recording takes 0.2 s, as much as is saved on 100 images
_MOST = 8  # shapes that are recorded
Function = Callable[..., tuple[torch.Tensor, ...]]


class Replay:
    """A function, recorded for each of the first shapes that it is called with again.

    Where torch cannot record it is called as it is. Call it in inference mode, always with the same types of numbers.

    Args:
        function: from tensors to tensors; what it does depends on their shapes only.
        owner: an object that holds, at any depth, the weights that it reads.
        fallbacks: told if torch cannot record it.
    """

    def __init__(self, function: Function, owner: object, fallbacks: Fallbacks) -> None:
        self._function, self._owner, self._fallbacks = function, owner, fallbacks
        self._calls: dict[tuple[torch.Size, ...], int] = {}
        self._records: dict[tuple[torch.Size, ...], Function] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the function gives."""
        shapes = tuple([x.shape for x in tensors])
        record = self._records.get(shapes)
        if record is not None:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                return record(*tensors)
        if len(self._records) < _MOST:
            calls = self._calls[shapes] = self._calls.get(shapes, 0) + 1
            if calls > RECORDED_AFTER:
                self._records[shapes] = self._record(tensors)
        return self._function(*tensors)

    def _record(self, tensors: tuple[torch.Tensor, ...]) -> Function:
        try:
            return torch.jit.trace(_Recorded(self._function, self._owner), tensors, check_trace=False)  # type: ignore[no-any-return]
        except (RuntimeError, NotImplementedError) as error:
            self._fallbacks.note(f"the detector takes longer, as torch cannot record it: {reason_of(error)}")
            return self._function


class _Recorded(nn.Module):
    """What `torch.jit.trace` takes: weights in oneDNN's own layout have to be parts of a module."""

    def __init__(self, function: Function, owner: object) -> None:
        super().__init__()
        self._function = function
        for number, weight in enumerate(_packed(owner, set())):
            self.register_buffer(f"packed_{number}", weight)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._function(*tensors)


def _packed(held: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in oneDNN's layout that an object holds."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        if held.is_mkldnn:
            yield held
        return
    parts: list[Any] = []
    if isinstance(held, dict):
        parts = list(held.values())
    elif isinstance(held, list | tuple):
        parts = list(held)
    elif not isinstance(held, type):
        parts = [*getattr(held, "__dict__", {}).values()]
        parts += [getattr(held, name, None) for name in getattr(type(held), "__slots__", ())]
    for part in parts:
        yield from _packed(part, seen)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, act: str) -> torch.Tensor:
    """Product by oneDNN of x (..., in) with a weight (out, in), in its layout or not, and an activation."""
    if torch._C._get_tracing_state() is not None:
        return _scripted()[0](x, weight, bias, act)  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, act, [], "")  # type: ignore[no-any-return]


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, how: Any, act: str) -> torch.Tensor:
    """Convolution by oneDNN of maps (N, in, H, W); `how` is padding, stride, dilation and groups."""
    if torch._C._get_tracing_state() is not None:
        return _scripted()[1](x, weight, bias, *how, act)  # type: ignore[no-any-return]
    return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *how, act, [], "")  # type: ignore[no-any-return]


@functools.cache
def _scripted() -> tuple[Any, Any]:
    """The same in torch's script, as these operators' empty lists cannot be recorded."""
    unit = torch.jit.CompilationUnit(
        """
def linear(x: Tensor, weight: Tensor, bias: Tensor, act: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, act, [], "")

def convolution(
    x: Tensor, weight: Tensor, bias: Tensor, padding: List[int], stride: List[int], dilation: List[int],
    groups: int, act: str
) -> Tensor:
    return torch.ops.mkldnn._convolution_pointwise(
        x, weight, bias, padding, stride, dilation, groups, act, [], ""
    )
"""
    )
    return unit.linear, unit.convolution
