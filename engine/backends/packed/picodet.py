"""The detector of a tower on CUDA in half precision: a kernel a convolution, with its bias and its activation.

`packed_picodet` with other layers: cuDNN's are three kernels each, and slow where they are depthwise. Needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from saccade.engine.backends.packed_picodet import Convolution, Evidences, Gain, Layers, PackedPicoDet, Pointwise, Size
from saccade.engine.kernels.detector.convolution import depthwise, pointwise
from saccade.engine.models.moondream.picodet import ConvAct, PicoDet, SqueezeExcite


def packed(plain: PicoDet, dtype: torch.dtype) -> PackedPicoDet:
    """A detector on CUDA that is not trained any more, in float16 or bfloat16."""
    return PackedPicoDet(plain, dtype, _CudaLayers)


class _CudaLayers(Layers):
    def pointwise(self, conv: ConvAct, order: Sequence[int] | None = None) -> Pointwise:
        return _Pointwise(conv, self.dtype, order)

    def convolution(self, conv: ConvAct, order: Sequence[int] | None = None) -> Convolution:
        return _Convolution(conv, self.dtype, order)

    def gain(self, plain: SqueezeExcite) -> Gain:
        return _Gain(plain)

    def repeated(self, run: Evidences, state: dict[str, object]) -> Evidences:
        return run


class _Pointwise(Pointwise):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return pointwise(x, self.weight, self.bias, self.act)

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return pointwise(x, self.weight, self.bias, False, out)


class _Convolution(Convolution):
    def __init__(self, conv: ConvAct, dtype: torch.dtype, order: Sequence[int] | None = None) -> None:
        super().__init__(conv, dtype, order)
        self._taps = self.weight[:, 0].flatten(1).t().contiguous()
        self._stride = conv.stride[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        padding, stride, dilation, groups = self.how
        out = F.conv2d(x, self.weight, self.bias, stride, padding, dilation, groups)
        return F.hardswish(out, inplace=True) if self.act else out

    def rows(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        return depthwise(x, size, self._taps, self.bias, self._stride, self.act)


class _Gain(Gain):
    def means(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, dtype=torch.float32)
