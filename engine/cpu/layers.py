"""oneDNN layers for CPUs: linear layers and MLPs outside the text decoder, and the detector of nano.

Activations are fused into GEMMs, and weights are packed once. PyTorch layers run instead if oneDNN is missing or the
dtype is not float32. `fuse_model` replaces the layers of a model.

`Replay` records operations once with `torch.jit.trace`, and replays them without Python.

A feature map of the detector is stored as a matrix (N·H·W, channels), which is the channels-last memory format. A
pointwise convolution is then a GEMM, and selecting half of the channels needs no copy. Channels are never interleaved
in memory. Instead, the rows and columns of the weights are permuted. On CPUs with bfloat16 GEMMs, feature maps and
weights are bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.errors import Fallbacks, reason_of
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.engine.models.nano.picodet import (
    Branch,
    ConvAct,
    Csp,
    Down,
    Evidence,
    Head,
    PicoDet,
    Separable,
    SqueezeExcite,
)
from saccade.engine.models.protocol import Model

_FEW = 16  # with at most this number of rows, a plain GEMM is faster than oneDNN's kernel lookup
_FEW_PACKED = 1  # the same limit for packed weights
# Numbers of weights; below the first, MKL is faster; matrices above the second are not stored twice.
_LEAST_PACKED, _MOST_PACKED = 1 << 16, 1 << 22
_ROWS = 64  # number of rows for which the packed layout is chosen; it is the same for any number above one


class Linear:
    """A linear layer on a CPU. If the matrix is small, its weights are packed once for oneDNN.

    | nano's matrix (960, 192) on an AMD EPYC | oneDNN | MKL |
    |---|---|---|
    | 6 rows | 36 µs | 49 µs |
    | 146 rows | 490 µs | 530 µs |

    Args:
        weight: (out, in). It must not change afterwards.
        bias: (out,).
        dtype: dtype of the GEMM. The output has the dtype of the input. The default is the dtype of the weight.
    """

    __slots__ = ("_dtype", "_packed", "_packs", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._dtype = weight.dtype if dtype is None else dtype
        self.weight, self.bias = weight.to(self._dtype), bias.to(self._dtype)
        self._packs = _LEAST_PACKED <= weight.numel() <= _MOST_PACKED
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output (..., out) for x (..., in), plus `add` (..., out) if given."""
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
    """An MLP with the activation fused into its first GEMM (oneDNN)."""

    def __init__(self, plain: Mlp) -> None:
        super().__init__()
        self.fc1, self.fc2 = plain.fc1, plain.fc2
        self._out = Linear(plain.fc2.weight, plain.fc2.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output (..., out) of the MLP for x (..., width)."""
        inner = torch.ops.mkldnn._linear_pointwise(x, self.fc1.weight, self.fc1.bias, "gelu", [], "tanh")
        return self._out(inner)


class FusedLinear(nn.Module):
    """Drop-in replacement for `nn.Linear`. It computes with oneDNN and packed weights."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self._product = Linear(plain.weight, plain.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear layer: map (..., in) to (..., out)."""
        return self._product(x)


def usable(x: torch.Tensor) -> bool:
    """Return whether oneDNN supports the dtype and device of a tensor."""
    return _available() and x.dtype == torch.float32 and x.device.type == "cpu"


def _available() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


# ---- operations without Python

RECORDED_AFTER = 16  # calls before recording; recording takes 0.2 s, which is saved on 100 images
_MOST = 8  # maximum number of recorded shapes
_MOST_COUNTED = 256  # maximum number of shapes with call counts
Function = Callable[..., tuple[torch.Tensor, ...]]


class Replay:
    """Wraps a function. Its operations are recorded once per input shape, and then replayed without Python.

    If `torch.jit.trace` cannot record the function, every call runs the function itself. All calls must use inference
    mode and the same dtypes.

    Args:
        function: function from tensors to tensors. Its sequence of operations must depend only on the input shapes.
        owner: object whose attributes (recursively) contain the weights that the function reads.
        fallbacks: collects a message if the function cannot be recorded.
    """

    def __init__(self, function: Function, owner: object, fallbacks: Fallbacks) -> None:
        self._function, self._owner, self._fallbacks = function, owner, fallbacks
        self._calls: dict[tuple[torch.Size, ...], int] = {}
        self._records: dict[tuple[torch.Size, ...], Function] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay the recorded operations for these input shapes. Without a record, run the wrapped function."""
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
            self._fallbacks.note(f"the detector is slower, because torch.jit.trace failed: {reason_of(error)}")
            return self._function


class _Recorded(nn.Module):
    """Module that contains oneDNN-packed weights as buffers, as `torch.jit.trace` requires."""

    def __init__(self, function: Function, owner: object) -> None:
        super().__init__()
        self._function = function
        for number, weight in enumerate(_packed(owner, set())):
            self.register_buffer(f"packed_{number}", weight)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._function(*tensors)


def _packed(held: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield all tensors packed by oneDNN in an object and, recursively, in its attributes."""
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
    """Compute a linear layer and its activation with oneDNN. x is (..., in). The weight (out, in) may be packed."""
    if torch._C._get_tracing_state() is not None:
        return _scripted()[0](x, weight, bias, act)  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, act, [], "")  # type: ignore[no-any-return]


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, how: Any, act: str) -> torch.Tensor:
    """Compute a convolution of x (N, in, H, W) with oneDNN. `how` is (padding, stride, dilation, groups)."""
    if torch._C._get_tracing_state() is not None:
        return _scripted()[1](x, weight, bias, *how, act)  # type: ignore[no-any-return]
    return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *how, act, [], "")  # type: ignore[no-any-return]


@functools.cache
def _scripted() -> tuple[Any, Any]:
    """Return the oneDNN operators for linear layers and convolutions as TorchScript functions."""
    # `torch.jit.trace` rejects the empty lists that these operators take as arguments.
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


# ---- the detector

T = TypeVar("T")
_MANY = 600  # minimum rows for which oneDNN with fused activation is faster than MKL with a separate activation
Evidences = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Function from crops to the fields of `Evidence`."""
Size = tuple[int, int, int]
"""Number of images, rows and columns of a feature map."""


class PackedPicoDet(nn.Module):
    """A `PicoDet` detector with fused layers, for inference only.

    Args:
        plain: the detector to convert. It remains unchanged.
        dtype: float32 or bfloat16.
        layers: factory of the layers. The default creates layers for CPUs.
    """

    def __init__(self, plain: PicoDet, dtype: torch.dtype, layers: Layers | None = None) -> None:
        super().__init__()
        self.n_classes, self.reduce = plain.n_classes, plain.reduce
        self.dtype = dtype
        layers = layers or Layers(dtype)
        self._first = layers.convolution(plain.first)
        self._stages, self._reduce = [], []
        order: list[int] | None = None
        for stage, reduce in zip(plain.stages, plain.reduce, strict=True):
            assert isinstance(stage, nn.Sequential)
            assert isinstance(reduce, ConvAct)
            packed = _Stage(stage, order, layers)
            order = packed.order
            self._stages.append(packed)
            self._reduce.append(layers.pointwise(reduce, order))
        self._top_down = [_Csp(csp, layers) for csp in _of(Csp, plain.top_down)]
        self._bottom_up = [_Csp(csp, layers) for csp in _of(Csp, plain.bottom_up)]
        self._down = [_Separable(one, layers) for one in _of(Separable, plain.down)]
        self._last_in, self._last_out = _Separable(plain.last_in, layers), _Separable(plain.last_out, layers)
        self._heads = [_Head(head, layers) for head in _of(Head, plain.heads)]
        self._run = layers.repeated(self._evidence, self.__dict__)

    def forward(self, crops: torch.Tensor) -> Evidence:
        """Run the detector on crops (N, 3, H, W) with values from -1 to 1."""
        return Evidence(*self._run(crops))

    def _evidence(self, crops: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the detector."""
        # `Replay` supports only tuples of tensors.
        x, size = _pool(self._first(crops.to(self.dtype)))
        reduced = []
        for stage, reduce in zip(self._stages, self._reduce, strict=True):
            x, size = stage(x, size)
            reduced.append((reduce(x), size))
        (fine, size8), (middle, size16), (coarse, size32) = reduced
        middle = self._top_down[0](coarse, middle, size16)
        fine = self._top_down[1](middle, fine, size8)
        middle = self._bottom_up[0](self._down[0](fine, size8), middle, size16)
        last = self._bottom_up[1](self._down[1](middle, size16), coarse, size32)
        end = self._last_in(coarse, size32).add_(self._last_out(last, size32))
        maps = [(fine, size8), (middle, size16), (last, size32), (end, _halved(size32))]
        n = len(crops)
        out = torch.cat(
            [head(x, at).view(n, -1, head.width) for head, (x, at) in zip(self._heads, maps, strict=True)], 1
        )
        features = torch.cat([x.view(n, -1, x.shape[1]) for x, _ in maps], dim=1)
        return features, out[..., : self.n_classes], out[..., self.n_classes :], _map(last, size32)


class Pointwise:
    """Pointwise (1×1) convolution of feature maps (N·H·W, channels). `order` permutes the input channels."""

    def __init__(self, conv: ConvAct, dtype: torch.dtype, order: Sequence[int] | None = None) -> None:
        weight = conv.weight.flatten(1)
        assert conv.bias is not None
        self.weight = (weight if order is None else weight[:, order]).to(dtype).contiguous()
        self.bias = conv.bias.to(dtype)
        self.act = conv.act == "hswish"
        self._least = _MANY if dtype == torch.float32 else 0
        self._transposed = self.weight.t()
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the convolution and the activation to x (N·H·W, in). Return (N·H·W, out)."""
        if len(x) < self._least or not x.is_contiguous():
            out = self.product(x)
            return F.hardswish(out, inplace=True) if self.act else out
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, len(x))
        return linear(x, self._packed, self.bias, "hardswish" if self.act else "none")

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the convolution without the activation to x (N·H·W, in). Return (N·H·W, out), in `out` if given."""
        return torch.addmm(self.bias, x, self._transposed, out=out)


class Convolution:
    """Convolution larger than 1×1 with activation. Feature maps (N, channels, H, W) are in channels-last format."""

    def __init__(self, conv: ConvAct, dtype: torch.dtype, order: Sequence[int] | None = None) -> None:
        assert conv.bias is not None
        weight, bias = conv.weight, conv.bias
        if order is not None:
            weight, bias = weight[order], bias[order]
        self.weight = weight.to(dtype).contiguous(memory_format=torch.channels_last)
        self.bias = bias.to(dtype).contiguous()
        assert not isinstance(conv.padding, str)
        self.how = list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups
        self.act = conv.act == "hswish"
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply convolution and activation: (N, inner, H, W) to (N, outer, ceil(H / stride), ceil(W / stride))."""
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_convolution_weight(self.weight, *self.how, list(x.shape))
        return convolution(x, self._packed, self.bias, self.how, "hardswish" if self.act else "none")

    def rows(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """Apply convolution and activation to feature maps (N·H·W, channels), with `size` (N, H, W)."""
        return _rows(self(_map(x, size)))


class Gain:
    """In-place squeeze-and-excitation layer. Its weights are float32, which is faster in GEMMs this small."""

    def __init__(self, plain: SqueezeExcite) -> None:
        self._fc1 = plain.fc1.weight.float().t(), plain.fc1.bias.float()
        self._fc2 = plain.fc2.weight.float().t(), plain.fc2.bias.float()

    def __call__(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """Multiply each channel of the feature maps x (N·H·W, channels) by its gain, in place. `size` is (N, H, W)."""
        x = x.view(size[0], -1, x.shape[1])
        mean = self.means(x)
        inner = torch.addmm(self._fc1[1], mean, self._fc1[0]).relu_()
        gain = F.hardsigmoid(torch.addmm(self._fc2[1], inner, self._fc2[0]), inplace=True)
        return x.mul_(gain.to(x.dtype).unsqueeze(1)).flatten(0, 1)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of each channel, (N, channels) float32, of feature maps (N, H·W, channels)."""
        return x.sum(1).float() / x.shape[1]


class Layers:
    """Creates the layers of a detector for CPUs.

    Args:
        dtype: float32 or bfloat16.
        fallbacks: collects messages about slower implementations that are used.
    """

    def __init__(self, dtype: torch.dtype, fallbacks: Fallbacks | None = None) -> None:
        self.dtype, self._fallbacks = dtype, Fallbacks() if fallbacks is None else fallbacks

    def pointwise(self, conv: ConvAct, order: Sequence[int] | None = None) -> Pointwise:
        """Return a 1×1 convolution layer. `order` permutes its input channels."""
        return Pointwise(conv, self.dtype, order)

    def convolution(self, conv: ConvAct, order: Sequence[int] | None = None) -> Convolution:
        """Return a convolution layer larger than 1×1. `order` permutes the channels of a depthwise convolution."""
        return Convolution(conv, self.dtype, order)

    def gain(self, plain: SqueezeExcite) -> Gain:
        """Return a squeeze-and-excitation layer."""
        return Gain(plain)

    def repeated(self, run: Evidences, state: dict[str, object]) -> Evidences:
        """Return a faster version of `run`: operations are recorded once per input shape and then replayed."""
        return Replay(run, state, self._fallbacks)


class _Separable:
    def __init__(self, plain: Separable, layers: Layers) -> None:
        self._dw, self._pw = layers.convolution(plain.dw), layers.pointwise(plain.pw)

    def __call__(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        return self._pw(self._dw.rows(x, size))


class _Down:
    def __init__(self, plain: Down, order: Sequence[int] | None, layers: Layers) -> None:
        branch = plain.branch
        self._dw, self._pw = layers.convolution(plain.dw, order), layers.pointwise(plain.pw, order)
        self._pw1, self._branch_dw = layers.pointwise(branch.pw1, order), layers.convolution(branch.dw)
        self._gain, self._pw2 = layers.gain(branch.se), layers.pointwise(branch.pw2)
        self._mix_dw, self._mix_pw = layers.convolution(plain.mix_dw), layers.pointwise(plain.mix_pw)

    def __call__(self, x: torch.Tensor, size: Size) -> tuple[torch.Tensor, Size]:
        after = _halved(size)
        inner = self._gain(self._branch_dw.rows(self._pw1(x), size), after)
        half = len(self._pw.weight)
        both = x.new_empty(len(inner), 2 * half)
        self._pw.product(self._dw.rows(x, size), both[:, :half])
        self._pw2.product(inner, both[:, half:])
        F.hardswish(both, inplace=True)
        return self._mix_pw(self._mix_dw.rows(both, after)), after


class _Branch:
    def __init__(self, plain: Branch, order: Sequence[int], layers: Layers) -> None:
        self._pw1, self._dw = layers.pointwise(plain.pw1, order), layers.convolution(plain.dw)
        self._gain, self._pw2 = layers.gain(plain.se), layers.pointwise(plain.pw2)

    def __call__(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        x = self._pw1(x)
        return self._pw2(self._gain(torch.cat([x, self._dw.rows(x, size)], dim=1), size))


class _Stage:
    """One stage of the detector's backbone, without channel shuffle.

    The weights are permuted instead of the feature maps, so that unchanged channels are not copied.

    Attributes:
        order: original index of each output channel.
    """

    def __init__(self, plain: nn.Sequential, order: Sequence[int] | None, layers: Layers) -> None:
        down, *units = plain
        assert isinstance(down, Down)
        self._down = _Down(down, order, layers)
        channels = down.mix_pw.out_channels
        half = channels // 2
        held = [(0, channel) for channel in range(channels)]  # (unit, channel of that unit) of each channel
        self._units = []
        for number, unit in enumerate(units, 1):
            parts, places = _parts(held[half:])
            assert isinstance(unit.branch, Branch)
            self._units.append((parts, _Branch(unit.branch, places, layers)))
            held = [one for i in range(half) for one in (held[i], (number, i))]
        self._parts, self.order = _parts(held)

    def __call__(self, x: torch.Tensor, size: Size) -> tuple[torch.Tensor, Size]:
        x, size = self._down(x, size)
        made = [x]
        for parts, branch in self._units:
            made.append(branch(_join(made, parts), size))
        return _join(made, self._parts), size


Part = tuple[int, int, int]
"""A unit's index, and a range (start, stop) of its output channels."""


def _parts(wanted: list[tuple[int, int]]) -> tuple[list[Part], list[int]]:
    """Combine output channels of several `Unit` layers into contiguous channel ranges.

    Args:
        wanted: channels, each (index of the unit, output channel of the unit).

    Returns:
        The channel ranges, and for each channel in these ranges its index in `wanted`.
    """
    parts, places = [], []
    for unit in sorted({unit for unit, _ in wanted}, reverse=True):
        channels = sorted(channel for one, channel in wanted if one == unit)
        parts.append((unit, channels[0], channels[-1] + 1))
        places += [wanted.index((unit, channel)) for channel in range(channels[0], channels[-1] + 1)]
    return parts, places


def _join(made: list[torch.Tensor], parts: list[Part]) -> torch.Tensor:
    views = [made[unit][:, start:stop] for unit, start, stop in parts]
    return views[0] if len(views) == 1 else torch.cat(views, dim=1)


class _Csp:
    def __init__(self, plain: Csp, layers: Layers) -> None:
        weight = torch.cat([plain.main.weight, plain.short.weight]).flatten(1).to(layers.dtype)
        first, second = weight.chunk(2, dim=1)
        self._first, self._second = first.t(), second.t()
        assert plain.main.bias is not None
        assert plain.short.bias is not None
        self._bias = torch.cat([plain.main.bias, plain.short.bias]).to(layers.dtype)
        self._pw1, self._dw = layers.pointwise(plain.pw1), layers.convolution(plain.dw)
        self._pw2, self._final = layers.pointwise(plain.pw2), layers.pointwise(plain.final)

    def __call__(self, first: torch.Tensor, second: torch.Tensor, size: Size) -> torch.Tensor:
        both = torch.addmm(self._bias, second, self._second)
        if len(first) == len(second):
            both.addmm_(first, self._first)
        else:
            n, height, width = size
            small = torch.mm(first, self._first).view(n, height // 2, 1, width // 2, 1, -1)
            both.view(n, height // 2, 2, width // 2, 2, -1).add_(small)
        F.hardswish(both, inplace=True)
        main = both[:, : both.shape[1] // 2]
        self._pw2.product(self._dw.rows(self._pw1(main), size), main)
        F.hardswish(main, inplace=True)
        return self._final(both)


class _Head:
    def __init__(self, plain: Head, layers: Layers) -> None:
        self._first, self._second = _Separable(plain.first, layers), _Separable(plain.second, layers)
        self._out = layers.pointwise(plain.out)
        self.width = plain.out.out_channels

    def __call__(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        return self._out(self._second(self._first(x, size), size))


def _pool(x: torch.Tensor) -> tuple[torch.Tensor, Size]:
    """Apply 3×3 max pooling with stride 2 to x (N, channels, H, W), where H and W are even.

    Return the result (N·H·W / 4, channels) and its size (N, H / 2, W / 2).
    """
    n, channels, height, width = x.shape
    # PyTorch's max pooling also computes indices. For a 208×208 map it takes 1.4 ms, this code 0.4 ms.
    pairs = x.permute(0, 2, 3, 1).view(n, height, width // 2, 2, channels)
    even, odd = pairs.unbind(3)
    across = torch.maximum(even, odd)
    torch.maximum(across[:, :, 1:], odd[:, :, :-1], out=across[:, :, 1:])
    even, odd = across.view(n, height // 2, 2, width // 2, channels).unbind(2)
    out = torch.maximum(even, odd)
    torch.maximum(out[:, 1:], odd[:, :-1], out=out[:, 1:])
    return out.view(-1, channels), (n, height // 2, width // 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _map(x: torch.Tensor, size: Size) -> torch.Tensor:
    return x.view(*size, x.shape[1]).permute(0, 3, 1, 2)


def _halved(size: Size) -> Size:
    return size[0], (size[1] + 1) // 2, (size[2] + 1) // 2


def _of(kind: type[T], modules: Iterable[nn.Module]) -> list[T]:
    return [module for module in modules if isinstance(module, kind)]


# ---- replacement of a model's layers


def fast_dtype() -> torch.dtype:
    """Return the fastest dtype for the detector: bfloat16 if the CPU has bfloat16 instructions, else float32.

    The detector has the same mAP50 (0.562 on the validation split) in both dtypes.
    """
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def product_dtype(model: Model, exact: bool) -> torch.dtype:
    """Return the dtype of most GEMMs of a model on a CPU. With `exact`, it is the dtype of the model."""
    return model.dtype if exact or not isinstance(model.vision, DetectorTower) else fast_dtype()


def fuse_model(model: Model, exact: bool, fallbacks: Fallbacks) -> None:
    """Replace the layers of a model outside its text decoder by fused layers.

    Args:
        model: the model.
        exact: whether to compute in the model's dtype only; see `EngineConfig.exact`.
        fallbacks: collects messages about slower implementations that are used.
    """
    if isinstance(model.vision, nn.Module):
        fuse(model.vision, product_dtype(model, exact), fallbacks)
        if isinstance(model.vision, DetectorTower) and not exact:
            model.vision.quick_crops = True
    if isinstance(model.region, nn.Module):
        for name, decoder in list(model.region.named_children()):
            if isinstance(decoder, nn.Linear):
                model.region.set_submodule(name, FusedLinear(decoder))


def fuse(model: nn.Module, detector: torch.dtype = torch.float32, fallbacks: Fallbacks | None = None) -> None:
    """Replace the layers of a model with faster layers for inference.

    The model can be copied only before its first inference.

    Args:
        model: a float32 model. Models of other dtypes do not change.
        detector: dtype of a `PicoDet` in the model.
        fallbacks: collects messages about slower implementations that are used.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Mlp) and usable(module.fc1.weight):
            model.set_submodule(name, FusedMlp(module))
        elif isinstance(module, PicoDet) and usable(module.first.weight):
            model.set_submodule(name, PackedPicoDet(module, detector, Layers(detector, fallbacks)))
