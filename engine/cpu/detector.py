"""The detector of a tower as a CPU runs it fastest: its weights laid out once, its maps as rows of a product.

A map is a matrix (N·H·W, channels) here, which is how channels-last lies in memory: a pointwise convolution is a
product, and half of the channels a view. What that saves, of 26 ms in one thread with `onednn.FusedConv`: no channels
are interleaved (which of them a unit reads is in its weights), none are joined where a product can write beside what is
there, and a map that is doubled in size is multiplied before it is.

On a CPU with bfloat16 products of its own, maps and weights are bfloat16. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.cpu.onednn import Replay, convolution, linear
from saccade.engine.errors import Fallbacks
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

T = TypeVar("T")
_MANY = 600  # rows from which oneDNN's product with its activation is faster than MKL's and a pass for the activation
Evidences = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""From crops to the parts of `Evidence`."""
Size = tuple[int, int, int]
"""Images, rows and columns of a map."""


def fast_dtype() -> torch.dtype:
    """The type of numbers that this CPU multiplies fastest without loss of AP: bfloat16 where it has products of it.

    On val, what the tower finds in float32 and in bfloat16 has an AP50 of person .709 and .708, car .684 and .686, face
    .781 and .785, mean .562 and .562 (AP .394 and .392).
    """
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


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
