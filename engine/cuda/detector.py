"""Object detector on CUDA. Triton kernels compute its pointwise and depthwise convolutions, bias and activation.

The structure is that of `cpu.layers`, with CUDA layers. Triton is required. cuDNN would need three kernels for each of
these convolutions, and half a minute to choose its algorithms at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional as F

from saccade.engine.cpu.layers import Convolution, Evidences, Gain, Layers, PackedPicoDet, Pointwise, Size
from saccade.engine.kernels.detector import depthwise, pointwise
from saccade.engine.models.nano.picodet import ConvAct, PicoDet, SqueezeExcite

_COMPILERS = 8  # threads; Triton releases the GIL for most of a compilation


def packed(plain: PicoDet, dtype: torch.dtype) -> PackedPicoDet:
    """Return a copy of a detector for inference on CUDA, with the given dtype. All kernels are compiled.

    Raises:
        Exception: any error of Triton if it cannot compile or run the kernels.
    """
    layers = _CudaLayers(dtype)
    detector = PackedPicoDet(plain, dtype, layers)
    with ThreadPoolExecutor(_COMPILERS) as pool:
        for _ in pool.map(lambda layer: layer.compile(), layers.made.values()):
            pass
    crops = plain.first.weight.new_zeros(1, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        detector(crops)  # errors occur here, while the caller can still use another implementation
    return detector


class _CudaLayers(Layers):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.made: dict[object, _Pointwise | _Convolution] = {}  # one entry per kernel configuration

    def pointwise(self, conv: ConvAct, order: Sequence[int] | None = None) -> Pointwise:
        layer = _Pointwise(conv, self.dtype, order)
        outer, inner = layer.weight.shape
        self.made.setdefault((outer > 64, outer % 16 == 0, inner % 16 == 0), layer)
        return layer

    def convolution(self, conv: ConvAct, order: Sequence[int] | None = None) -> Convolution:
        layer = _Convolution(conv, self.dtype, order)
        if layer.depthwise:
            self.made.setdefault((conv.kernel_size, conv.stride, conv.in_channels % 16 == 0), layer)
        return layer

    def gain(self, plain: SqueezeExcite) -> Gain:
        return _Gain(plain)

    def repeated(self, run: Evidences, state: dict[str, object]) -> Evidences:
        return run


class _Pointwise(Pointwise):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return pointwise(x, self.weight, self.bias, self.act)

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return pointwise(x, self.weight, self.bias, False, out)

    def compile(self) -> None:
        with torch.inference_mode():
            self(self.weight.new_zeros(1, self.weight.shape[1]))


class _Convolution(Convolution):
    def __init__(self, conv: ConvAct, dtype: torch.dtype, order: Sequence[int] | None = None) -> None:
        super().__init__(conv, dtype, order)
        self.depthwise = conv.groups == conv.in_channels
        self._taps = self.weight[:, 0].flatten(1).t().contiguous()
        self._stride = conv.stride[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        padding, stride, dilation, groups = self.how
        out = F.conv2d(x, self.weight, self.bias, stride, padding, dilation, groups)
        return F.hardswish(out, inplace=True) if self.act else out

    def rows(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        return depthwise(x, size, self._taps, self.bias, self._stride, self.act)

    def compile(self) -> None:
        with torch.inference_mode():
            self.rows(self._taps.new_zeros(4, self._taps.shape[1]), (1, 2, 2))


class _Gain(Gain):
    def means(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, dtype=torch.float32)
