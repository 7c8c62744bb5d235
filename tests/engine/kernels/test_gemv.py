"""Products of one row against float32. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from saccade.engine.models.quantization import dequantize, quantize
from tests.support.engine.kernels import DEVICE, far, needs_triton

pytestmark = needs_triton
DIM, FF, HEADS = 256, 448, 768


def weights(outputs: int, inputs: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """As the kernel reads them, and what they stand for."""
    plain = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) / inputs**0.5
    if not fp8:
        return plain, None, plain.float()
    packed, scale = quantize(plain)
    return packed, scale, dequantize(packed, scale, torch.float32)


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
def test_norm_product_and_gelu_of_one_row(fp8: bool) -> None:
    from saccade.engine.kernels.gemv import Shape, norm_gemv

    norm = torch.nn.LayerNorm(DIM, device=DEVICE, dtype=torch.bfloat16)
    norm.weight.normal_()
    norm.bias.normal_()
    x = torch.randn(1, DIM, device=DEVICE, dtype=torch.bfloat16)
    packed, scale, exact = weights(HEADS + FF, DIM, fp8)
    bias = torch.randn(HEADS + FF, device=DEVICE, dtype=torch.bfloat16)
    plain, gelu = (torch.full((1, width), torch.nan, device=DEVICE, dtype=torch.bfloat16) for width in (HEADS, FF))
    norm_gemv(x, norm, packed, scale, bias, plain, gelu, Shape(16, 4, True), pdl=False)
    wanted = F.layer_norm(x.float(), (DIM,), norm.weight.float(), norm.bias.float()) @ exact.t() + bias.float()
    assert far(plain, wanted[:, :HEADS]) < 0.01
    assert far(gelu, F.gelu(wanted[:, HEADS:], approximate="tanh")) < 0.01


@torch.inference_mode()
@pytest.mark.parametrize(("first", "fp8"), [(DIM, True), (DIM, False), (DIM + FF, False)])
def test_a_product_is_added_to_one_row(first: int, fp8: bool) -> None:
    from saccade.engine.kernels.gemv import Shape, add_gemv

    packed, scale, exact = weights(DIM, DIM + FF, fp8)
    x, into, bias = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((1, DIM + FF), (1, DIM), DIM))
    wanted = into.float() + x.float() @ exact.t() + bias.float()
    add_gemv(x, into, packed, scale, bias, first, Shape(4, 4, False), pdl=False)
    assert far(into, wanted) < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
def test_a_product_without_a_norm_is_left_in_float32(fp8: bool) -> None:
    from saccade.engine.kernels.gemv import Shape, norm_gemv

    packed, scale, exact = weights(FF, DIM, fp8)
    x, bias = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((1, DIM), FF))
    out = torch.full((1, FF), torch.nan, device=DEVICE)
    norm_gemv(x, None, packed, scale, bias, out, None, Shape(2, 4, True), pdl=False)
    assert far(out, x.float() @ exact.t() + bias.float()) < 1e-5


@torch.inference_mode()
def test_products_made_elsewhere_are_added_before_the_scale() -> None:
    from saccade.engine.kernels.gemv import Shape, add_gemv

    packed, scale, exact = weights(DIM, DIM + FF, True)
    assert scale is not None
    x, into, bias = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((1, DIM + FF), (1, DIM), DIM))
    wanted = into.float() + x.float() @ exact.t() + bias.float()
    delta = (x[0, DIM:].float() @ packed[:, DIM:].float().t()).contiguous()
    add_gemv(x[:, :DIM], into, packed, scale, bias, DIM, Shape(4, 4, False), delta=delta, pdl=False)
    assert far(into, wanted) < 0.01
