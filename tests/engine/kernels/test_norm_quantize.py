"""Addition and layer norm against float32. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.support.engine.kernels import DEVICE, far, needs_triton

pytestmark = needs_triton


@torch.inference_mode()
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("split_k", [0, 1, 4])
def test_sum_and_norm_of_rows(rows: int, split_k: int) -> None:
    from saccade.engine.kernels.norm_quantize import add_layernorm

    dim = 144
    norm = torch.nn.LayerNorm(dim, device=DEVICE)
    norm.weight.normal_()
    norm.bias.normal_()
    x, parts = torch.randn(rows, dim, device=DEVICE), torch.randn(max(1, split_k), rows, dim, device=DEVICE)
    wanted = x + parts.sum(0) if split_k else x.clone()
    delta = None if not split_k else parts[0] if split_k == 1 else parts
    got = add_layernorm(x, delta, norm)
    assert far(x, wanted) < 1e-6
    assert far(got, F.layer_norm(wanted, (dim,), norm.weight, norm.bias)) < 1e-5


@torch.inference_mode()
def test_norm_in_fp8_keeps_the_largest_of_each_row() -> None:
    from saccade.engine.kernels import E4M3, LARGEST
    from saccade.engine.kernels.norm_quantize import add_layernorm

    dim = 144
    norm = torch.nn.LayerNorm(dim, device=DEVICE)
    x = torch.randn(70, dim, device=DEVICE)
    wanted = norm(x)
    packed, scales = torch.empty(70, dim, dtype=E4M3, device=DEVICE), torch.empty(70, device=DEVICE)
    add_layernorm(x, None, norm, packed, scales=scales)
    assert far(scales * LARGEST, wanted.abs().amax(1)) < 1e-5
    assert far(packed.float() * scales.unsqueeze(1), wanted) < 0.08  # the interpreter truncates: 0.06; a GPU 0.026


@torch.inference_mode()
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no warps")
@pytest.mark.parametrize("dim", [48, 192, 2048])
def test_narrow_rows_have_the_same_norm_every_time(dim: int) -> None:
    """Warps that load the same values must load them before one of them stores the sum in place."""
    from saccade.engine.kernels.norm_quantize import add_layernorm

    norm = torch.nn.LayerNorm(dim, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(64, dim, device=DEVICE, dtype=torch.bfloat16)
    delta = torch.randn(4, 64, dim, device=DEVICE)
    found = [add_layernorm(x.clone(), delta, norm) for _ in range(2000)]
    assert sum(not torch.equal(one, found[0]) for one in found) == 0
