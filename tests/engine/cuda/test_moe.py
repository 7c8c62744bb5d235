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
    from saccade.engine.models.quantization import dequantize, quantize

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
    from saccade.engine.kernels.moe.few_experts import Routes, few_experts, router_products

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
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", dtypes())
def test_one_row_goes_through_experts_beside_attention(dtype: torch.dtype, fp8: bool) -> None:
    from saccade.engine.kernels.moe.one_row import GROW, Chosen, Shape, add_experts
    from saccade.engine.models.quantization import dequantize, quantize

    layer = made(dtype)
    packed, given = weights(layer, dtype, fp8)
    x, seen, into = (torch.randn(1, WIDTH, device=DEVICE, dtype=dtype) for _ in range(3))
    bias, product = torch.randn(WIDTH, device=DEVICE, dtype=dtype), torch.randn(WIDTH, WIDTH, device=DEVICE) / 16
    out, out_scale = quantize(product) if fp8 else (product.to(dtype), None)
    exact = dequantize(out, out_scale, torch.float32) if out_scale is not None else out.float()
    wanted = into.float() + layer(x).float() + seen.float() @ exact.t() + bias.float()
    row = torch.float16 if fp8 else dtype
    chosen, inner = Chosen(layer.router_logits(x), TOP, WIDTH, row), nothing(TOP, INNER, dtype=row)
    shape, (_, experts) = Shape(4, 4, 2, 4), layer.route(x)
    for number in (chosen.packed, chosen.ready):
        number.fill_(sum(int(expert) << (4 * rank) for rank, expert in enumerate(experts[0])))
    chosen.normed.copy_(x / GROW.value if fp8 else x)
    scales = None if given is None else (given[0], given[1])
    delta = nothing(WIDTH)
    add_experts(chosen, *packed, scales, inner, seen.to(row), out, out_scale, bias, delta, into, shape, pdl=False)
    assert int(chosen.ready) == 0
    assert far(into, wanted) < (1e-5 if dtype == torch.float32 and not fp8 else 0.01)


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("routed", ["", "routed", "all experts as good as each other"])
def test_what_the_norm_of_one_row_goes_through(routed: str, fp8: bool) -> None:
    from saccade.engine.kernels.moe.one_row import GROW, Chosen, IntoShape, row_into
    from saccade.engine.models.quantization import dequantize, quantize

    dtype, heads, ff, factors = dtypes()[0], 3 * WIDTH, 0 if routed else 448, 16
    row = torch.float16 if fp8 else dtype
    norm, layer = torch.nn.LayerNorm(WIDTH), made(dtype)
    if routed not in ("", "routed"):
        layer.router.weight.zero_()
        layer.router.bias.zero_()
    norm.to(DEVICE, dtype).weight.normal_()
    norm.bias.normal_()
    x, bias = (torch.randn(size, device=DEVICE, dtype=dtype) for size in ((1, WIDTH), heads + ff))
    weight, tau = (
        torch.randn(n, k, device=DEVICE, dtype=dtype) / 16 for n, k in ((heads + ff, WIDTH), (factors, heads))
    )
    packed, scale = quantize(weight) if fp8 else (weight, None)
    got, gelu = (nothing(1, width, dtype=dtype) for width in (heads, ff))
    products, chosen = nothing(heads // 16, 1, factors), Chosen(nothing(1, 16), TOP, WIDTH, row)
    router, shape = layer.router if routed else None, IntoShape(16, 4, 4)
    for _ in range(2):  # the second finds what the first has left
        row_into(x, norm, packed, scale, bias, tau, router, got, gelu, products, chosen, shape, pdl=False)
    y = F.layer_norm(x.float(), (WIDTH,), norm.weight.float(), norm.bias.float()).to(dtype)
    wanted = (
        y.float() @ (weight.float() if scale is None else dequantize(packed, scale, torch.float32)).t() + bias.float()
    )
    limit = 0.01 if dtype != torch.float32 else 0.001 if fp8 else 1e-5  # FP8's products are added up in float16
    assert far(got, wanted[:, :heads]) < limit
    assert far(products.sum(0), F.gelu(got.float()) @ tau.float().t()) < limit
    if routed:
        assert far(chosen.normed.float() * (GROW.value if fp8 else 1.0), y) < limit
        # One number of y rounded the other way moves logits by a thousandth.
        torch.testing.assert_close(chosen.logits, layer.router_logits(y), atol=3e-3, rtol=1e-4)
        best = chosen.logits[0].sort(descending=True, stable=True)
        assert [int(chosen.packed) >> 4 * rank & 15 for rank in range(TOP)] == best.indices[:TOP].tolist()
        assert torch.equal(chosen.ready, chosen.packed)
    else:
        assert far(gelu, F.gelu(wanted[:, heads:], approximate="tanh")) < limit


@torch.inference_mode()
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("rows", [1, 20] if DEVICE == "cpu" else [1, 20, 65, 500, 3000])
def test_many_rows_go_through_their_own_experts(rows: int, dtype: torch.dtype) -> None:
    from saccade.engine.kernels.moe.many_experts import SortedRows, grouped_product

    layer = made(dtype)
    x = torch.randn(rows, WIDTH, device=DEVICE, dtype=dtype)
    sorted_rows = SortedRows(x, layer.router, TOP)
    assert far(sorted_rows.weights.view(-1, TOP), layer.route(x)[0]) < 1e-5
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
