"""Layers as oneDNN runs them on a CPU: what follows a product is done in the same pass, weights are laid out once.

The operators are those that torch's own compiler makes of such layers. Where torch comes without oneDNN or is set not
to use it, or the numbers are not float32, the plain layers run.

Operations are recorded once and then replayed by torch's own interpreter, without Python (`Replay`). Nano's detector is
some 400 operations, 12 ms, of which Python takes 2. A record (`torch.jit.trace`, its optimizations off) does the same
operations on the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.errors import Fallbacks, reason_of
from saccade.engine.models.moondream.layers import Mlp

_FEW = 16  # rows up to which a product takes less time than oneDNN's lookup of its kernel
_FEW_PACKED = 1  # the same of a matrix that is laid out already
_LEAST_PACKED, _MOST_PACKED = 1 << 16, 1 << 22  # numbers: MKL is faster at fewer; more are not to be stored twice
_ROWS = 64  # that the layout is chosen for; from two on it is the same for all


class Linear:
    """A product with one matrix, which is laid out once as oneDNN reads it, if it is of a small model.

    With a matrix of nano (960, 192), six rows take 36 µs so, and 49 by MKL, 146 rows 490 and 530 (AMD EPYC).

    Args:
        weight: (out, in); not to be written to any more.
        bias: (out,).
        dtype: what rows are multiplied in, whatever they come in and are given back in; by default the weight's.
    """

    __slots__ = ("_dtype", "_packed", "_packs", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._dtype = weight.dtype if dtype is None else dtype
        self.weight, self.bias = weight.to(self._dtype), bias.to(self._dtype)
        self._packs = _LEAST_PACKED <= weight.numel() <= _MOST_PACKED
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Product (..., out) of x (..., in), plus `add` if that is given."""
        if self._dtype is not x.dtype:
            given = x.to(self._dtype)
            if _available():
                out = linear(given, self._weight(), self.bias, "none")
            else:
                out = F.linear(given, self.weight, self.bias)
            return out.to(x.dtype) if add is None else add + out
        rows = x.shape[:-1].numel()
        if rows <= (_FEW_PACKED if self._packs else _FEW) or not usable(x):
            out = F.linear(x, self.weight, self.bias)
            return out if add is None else out + add
        if add is None:
            return linear(x, self._weight(), self.bias, "none")
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, self._weight(), self.bias, "add")  # type: ignore[no-any-return]

    def _weight(self) -> torch.Tensor:
        if not self._packs:
            return self.weight
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), _ROWS)
        return self._packed


class FusedMlp(nn.Module):
    """An `Mlp`, its activation done with its first product."""

    def __init__(self, plain: Mlp) -> None:
        super().__init__()
        self.fc1, self.fc2 = plain.fc1, plain.fc2
        self._out = Linear(plain.fc2.weight, plain.fc2.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `Mlp.forward`."""
        inner = torch.ops.mkldnn._linear_pointwise(x, self.fc1.weight, self.fc1.bias, "gelu", [], "tanh")
        return self._out(inner)


class FusedLinear(nn.Module):
    """An `nn.Linear` as `Linear`."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self._product = Linear(plain.weight, plain.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear.forward`."""
        return self._product(x)


def usable(x: torch.Tensor) -> bool:
    """Whether oneDNN takes such numbers here."""
    return _available() and x.dtype == torch.float32 and x.device.type == "cpu"


def _available() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


# ---- operations without Python

RECORDED_AFTER = 16  # calls: the first lays weights out; recording takes 0.2 s, as much as is saved on 100 images
_MOST = 8  # shapes that are recorded
_MOST_COUNTED = 256  # shapes whose calls are counted
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
            if len(self._calls) >= _MOST_COUNTED:
                self._calls.clear()
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
