"""A model's layers beside its decoder as a CPU runs them fastest, by oneDNN: linear ones, MLPs, and nano's detector.

What follows a product is done in the same pass, and weights are laid out once. The operators are those that torch's own
compiler makes of such layers. Where torch comes without oneDNN or is set not to use it, or the numbers are not float32,
the plain layers run. `fuse_model` replaces a model's layers.

Operations are recorded once and then replayed by torch's own interpreter, without Python (`Replay`). Nano's detector is
some 400 operations, 12 ms, of which Python takes 2. A record (`torch.jit.trace`, its optimizations off) does the same
operations on the same numbers.

A detector's map is a matrix (N·H·W, channels) here, which is how channels-last lies in memory: a pointwise convolution
is a product, and half of the channels a view. So no channels are interleaved (which of them a unit reads is in its
weights), none are joined where a product can write beside what is there, and a map to be doubled in size is multiplied
first. On a CPU with bfloat16 products of its own, maps and weights are bfloat16. Knows nothing of tokens.
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


# ---- the detector

T = TypeVar("T")
_MANY = 600  # rows from which oneDNN's product with its activation is faster than MKL's and a pass for the activation
Evidences = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""From crops to the parts of `Evidence`."""
Size = tuple[int, int, int]
"""Images, rows and columns of a map."""


class PackedPicoDet(nn.Module):
    """In place of a `PicoDet` that is not trained any more.

    Args:
        plain: the detector; is not changed.
        dtype: float32 or bfloat16; an attribute, too.
        layers: how they are run; on a CPU by default.
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
        """As `PicoDet.forward`, in the detector's type of numbers."""
        return Evidence(*self._run(crops))

    def _evidence(self, crops: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of `Evidence`."""
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
    """A pointwise `ConvAct` over rows; `order` says which channel each column of the rows is."""

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
        """Rows (R, in) to (R, out)."""
        if len(x) < self._least or not x.is_contiguous():
            out = self.product(x)
            return F.hardswish(out, inplace=True) if self.act else out
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, len(x))
        return linear(x, self._packed, self.bias, "hardswish" if self.act else "none")

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same without its activation, written to `out` if that is given."""
        return torch.addmm(self.bias, x, self._transposed, out=out)


class Convolution:
    """Any other `ConvAct`, over maps (N, channels, H, W) in channels-last."""

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
        """As `ConvAct.forward`."""
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_convolution_weight(self.weight, *self.how, list(x.shape))
        return convolution(x, self._packed, self.bias, self.how, "hardswish" if self.act else "none")

    def rows(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """The same from rows to rows."""
        return _rows(self(_map(x, size)))


class Gain:
    """`SqueezeExcite`, in place; in float32 within, since so small a product takes longer in bfloat16."""

    def __init__(self, plain: SqueezeExcite) -> None:
        self._fc1 = plain.fc1.weight.float().t(), plain.fc1.bias.float()
        self._fc2 = plain.fc2.weight.float().t(), plain.fc2.bias.float()

    def __call__(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """Weigh the columns of rows by what each image's hold on average."""
        x = x.view(size[0], -1, x.shape[1])
        mean = self.means(x)
        inner = torch.addmm(self._fc1[1], mean, self._fc1[0]).relu_()
        gain = F.hardsigmoid(torch.addmm(self._fc2[1], inner, self._fc2[0]), inplace=True)
        return x.mul_(gain.to(x.dtype).unsqueeze(1)).flatten(0, 1)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """Of each image's columns, (N, columns) float32."""
        return x.sum(1).float() / x.shape[1]


class Layers:
    """How the layers of a detector are run, by their kinds: here on a CPU.

    Args:
        dtype: float32 or bfloat16.
        fallbacks: told what does not run here.
    """

    def __init__(self, dtype: torch.dtype, fallbacks: Fallbacks | None = None) -> None:
        self.dtype, self._fallbacks = dtype, Fallbacks() if fallbacks is None else fallbacks

    def pointwise(self, conv: ConvAct, order: Sequence[int] | None = None) -> Pointwise:
        """A convolution over 1×1; its inputs are in an `order` of their own."""
        return Pointwise(conv, self.dtype, order)

    def convolution(self, conv: ConvAct, order: Sequence[int] | None = None) -> Convolution:
        """Any other convolution."""
        return Convolution(conv, self.dtype, order)

    def gain(self, plain: SqueezeExcite) -> Gain:
        """The weights of channels."""
        return Gain(plain)

    def repeated(self, run: Evidences, state: dict[str, object]) -> Evidences:
        """What runs all of them again and again."""
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
    """A stage whose units leave what they keep where it is.

    A `Unit` keeps the first half of its channels, computes the other half anew and interleaves the two. So what
    a unit reads is the upper half of what the unit before it made, a quarter of what the one before that made, and so
    on: views, whose channels are in the order that this unit's weights are put in.

    Attributes:
        order: which channel of the plain stage each column of the rows is.
    """

    def __init__(self, plain: nn.Sequential, order: Sequence[int] | None, layers: Layers) -> None:
        down, *units = plain
        assert isinstance(down, Down)
        self._down = _Down(down, order, layers)
        channels = down.mix_pw.out_channels
        half = channels // 2
        held = [(0, channel) for channel in range(channels)]  # which unit made each channel, and which of its own it is
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
"""A unit, and which of the channels that it made: from, and up to."""


def _parts(wanted: list[tuple[int, int]]) -> tuple[list[Part], list[int]]:
    """Runs of channels (unit, channel) that hold those wanted, and which of those wanted each of their columns is."""
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
        """From maps as rows, the second of `size`, the first of that or of half of it."""
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
    """The largest of 3×3 of every second place of a map (N, channels, H, W) of even sides, as rows.

    Rows and columns one after another: torch's own pooling in channels-last also says where the largest was, which
    takes 1.4 ms of a 208×208 map instead of 0.4.
    """
    n, channels, height, width = x.shape
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


# ---- what replaces a model's layers


def fast_dtype() -> torch.dtype:
    """The type of numbers that this CPU multiplies fastest without loss of AP: bfloat16 where it has products of it.

    On val, what the tower finds in float32 and in bfloat16 has an AP50 of person .709 and .708, car .684 and .686, face
    .781 and .785, mean .562 and .562 (AP .394 and .392).
    """
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def product_dtype(model: Model, exact: bool) -> torch.dtype:
    """What most products of a model are computed in on a CPU; `exact` as in `EngineConfig`."""
    return model.dtype if exact or not isinstance(model.vision, DetectorTower) else fast_dtype()


def fuse_model(model: Model, exact: bool, fallbacks: Fallbacks) -> None:
    """Fuse, in place, the layers of a model beside its text decoder.

    Args:
        model: the model.
        exact: see `EngineConfig.exact`.
        fallbacks: told what does not run here.
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
    """Replace the layers of a model that is not trained any more. After its first image it cannot be copied.

    Args:
        model: in float32; another is left as it is.
        detector: what a `PicoDet` in it computes in.
        fallbacks: told what does not run here.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Mlp) and usable(module.fc1.weight):
            model.set_submodule(name, FusedMlp(module))
        elif isinstance(module, PicoDet) and usable(module.first.weight):
            model.set_submodule(name, PackedPicoDet(module, detector, Layers(detector, fallbacks)))
