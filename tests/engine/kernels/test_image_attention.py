"""Attention within images against float32. Runs where there is a GPU of Hopper: Triton's interpreter knows no Gluon."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.support.engine.kernels import far

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
triton = pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="there is no GPU of Hopper here"),
    pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="Gluon of another Triton"),
]
LIMIT = {torch.bfloat16: 0.008, torch.float16: 0.001}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "n_heads", "n_kv_heads", "tokens", "images"),
    [
        (72, 16, 16, 729, 3),
        (64, 32, 32, 730, 2),
        (64, 4, 2, 730, 1),
        (72, 2, 2, 65, 3),
        (16, 4, 2, 77, 1),
        (32, 1, 1, 128, 2),
        (40, 1, 1, 321, 2),
    ],
)
def test_tokens_see_their_image_and_no_other(
    head_dim: int, n_heads: int, n_kv_heads: int, tokens: int, images: int, dtype: torch.dtype
) -> None:
    from saccade.engine.kernels.image_attention import aligned, image_attention

    torch.manual_seed(tokens)
    rows, width = images * tokens, (n_heads + 2 * n_kv_heads) * head_dim
    # More rows behind the images' and columns behind the heads', as products of prompts and MLPs are.
    product = torch.randn(rows + 5, width + 24, device="cuda").to(dtype)
    product[:, head_dim] += 30  # of another head, if there are some: none may read what is beside it
    product[rows:] = torch.nan
    product[:, width:] = torch.nan
    out = torch.full((rows + 5, n_heads * head_dim + 8), 7.0, device="cuda", dtype=dtype)
    heads, seen = product[:rows, :width], out[:rows, : n_heads * head_dim]
    assert aligned(heads)
    every = heads.float().view(images, tokens, -1, head_dim).transpose(1, 2)
    q, k, v = every.split([n_heads, n_kv_heads, n_kv_heads], dim=1)
    wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=n_heads != n_kv_heads).transpose(1, 2).reshape(rows, -1)
    for _ in range(3):  # what comes too late does not always come too late
        seen.fill_(torch.nan)
        image_attention(heads, seen, images, n_heads, n_kv_heads)
        assert far(seen, wanted) < LIMIT[dtype]
    assert (out[rows:] == 7).all()
    assert (out[:, n_heads * head_dim :] == 7).all()


@torch.inference_mode()
def test_scores_far_below_zero_have_their_weights() -> None:
    from saccade.engine.kernels.image_attention import image_attention

    heads = torch.randn(77, 3 * 16, device="cuda").half()
    heads[:, :16], heads[:, 16:32] = heads[:, :16] * 0.1 + 10, heads[:, 16:32] - 20  # such are those of padding: 0
    out = torch.empty(77, 16, device="cuda", dtype=torch.float16)
    image_attention(heads, out, 1, 1, 1)
    q, k, v = heads.float().chunk(3, 1)
    assert far(out, F.scaled_dot_product_attention(q[None], k[None], v[None])[0]) < 0.01


def test_what_the_kernel_is_for() -> None:
    from saccade.engine.kernels.image_attention import aligned, supports

    assert supports(torch.bfloat16, 64, 730)
    assert supports(torch.float16, 72, 729)
    assert not supports(torch.float32, 64, 730)
    assert not supports(torch.float16, 64, 146)  # of nano: not measured
    assert not supports(torch.bfloat16, 32, 730)
    assert not supports(torch.bfloat16, 68, 730)
    assert not supports(torch.bfloat16, 128, 730)
    rows = torch.zeros(77, 3 * 80, dtype=torch.bfloat16, device="cuda")
    assert aligned(rows)
    assert not aligned(rows[:, 1:])
    assert not aligned(torch.zeros(77, 3 * 20, dtype=torch.bfloat16, device="cuda"))
