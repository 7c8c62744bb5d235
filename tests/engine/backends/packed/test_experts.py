"""The kernels of experts against the model's own modules: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

from saccade.engine.models.moondream.config import ExpertsConfig
from saccade.engine.models.moondream.layers import Experts

pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="there is no CUDA device here; TRITON_INTERPRET=1 runs it without one",
    ),
]
TOP, WIDTH, INNER = 4, 256, 256


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)


def made(dtype: torch.dtype) -> Experts:
    torch.manual_seed(0)
    layer = Experts(ExpertsConfig(16, 0, TOP, INNER), WIDTH).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return layer.to(DEVICE, dtype)


def dtypes() -> list[torch.dtype]:
    return [torch.float32] if DEVICE == "cpu" else [torch.bfloat16, torch.float16]


def weights(layer: Experts, dtype: torch.dtype, fp8: bool) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """A layer's matrices as kernels read them, and their scales in FP8; the layer is rounded to these."""
    from saccade.engine.backends.quantization import dequantize, quantize

    if not fp8:
        return [layer.fc1.weight, layer.fc2.weight], None
    packed, scales = [], []
    for part in (layer.fc1, layer.fc2):
        pairs = [quantize(one) for one in part.weight]
        part.weight.copy_(torch.stack([dequantize(*pair, dtype) for pair in pairs]))
        packed.append(torch.stack([one for one, _ in pairs]))
        scales.append(torch.stack([scale for _, scale in pairs]))
    return packed, scales


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("rows", [1, 3, 5] if DEVICE == "cpu" else [1, 2, 3, 16, 33, 64])
def test_few_rows_go_through_their_own_experts(rows: int, dtype: torch.dtype, fp8: bool) -> None:
    from saccade.engine.kernels.experts.few_experts import few_experts
    from saccade.engine.kernels.experts.router import Routes, router_products

    layer = made(dtype)
    packed, given = weights(layer, dtype, fp8)
    x = torch.randn(rows, WIDTH, device=DEVICE, dtype=dtype)
    inner, parts = nothing(rows * TOP, INNER, dtype=dtype), nothing(TOP, rows, WIDTH)
    logits, routes = nothing(rows, 16), Routes(16, 64 * TOP, torch.device(DEVICE))
    for _ in range(2):  # the second finds what the first has left
        router_products(x, layer.router, logits, routes, TOP)
    few_experts(routes, x, packed[0], packed[1], inner, parts, scales=None if given is None else (given[0], given[1]))
    wanted = layer(x)
    assert far(parts.sum(0), wanted) < (1e-5 if dtype == torch.float32 and not fp8 else 0.02)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("rows", [1, 20] if DEVICE == "cpu" else [1, 20, 65, 500, 3000])
def test_many_rows_go_through_their_own_experts(rows: int, dtype: torch.dtype) -> None:
    from saccade.engine.kernels.experts.many_experts import SortedRows, grouped_product

    layer = made(dtype)
    x = torch.randn(rows, WIDTH, device=DEVICE, dtype=dtype)
    sorted_rows = SortedRows(x, layer.router, TOP)
    assert far(sorted_rows.logits, layer.router_logits(x)) < 1e-5
    assert sorted(sorted_rows.order.tolist()) == [*range(rows * TOP)]
    inner = grouped_product(x, sorted_rows, layer.fc1.weight, nothing(rows * TOP, INNER, dtype=dtype))
    parts = grouped_product(inner, sorted_rows, layer.fc2.weight, nothing(TOP, rows, WIDTH, dtype=dtype))
    assert far(parts.float().sum(0), layer(x)) < (1e-5 if dtype == torch.float32 else 0.02)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [5, 130] if DEVICE == "cpu" else [1, 17, 70, 800])
def test_products_of_a_temperature(rows: int) -> None:
    from saccade.engine.kernels.temperature import temperature_parts, temperature_products

    dtype = dtypes()[0]
    heads = torch.randn(rows, 8 * WIDTH, device=DEVICE, dtype=dtype)
    tau = torch.randn(16, 8 * WIDTH, device=DEVICE, dtype=dtype)
    products = nothing(temperature_parts(8 * WIDTH, rows), rows, 16)
    temperature_products(heads, tau, products)
    wanted = F.gelu(heads.float()) @ tau.float().t()
    assert far(products.sum(0), wanted) < (1e-5 if dtype == torch.float32 else 0.01)
