"""Attention within images against float32. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.support.engine.kernels import DEVICE, far, needs_triton

pytestmark = needs_triton


@torch.inference_mode()
@pytest.mark.parametrize(
    ("head_dim", "n_heads", "n_kv_heads", "length", "beside"),
    [(72, 2, 2, 89, 0), (64, 4, 2, 82, 32), (64, 2, 2, 64, 0)],
)
def test_images_see_themselves_alone(head_dim: int, n_heads: int, n_kv_heads: int, length: int, beside: int) -> None:
    from saccade.engine.kernels.prefill.prefix_attention import Tile, prefix_attention

    width, images = (n_heads + 2 * n_kv_heads) * head_dim, 2
    rows = torch.randn(images * length, width + beside, device=DEVICE, dtype=torch.float16)
    out = torch.full((images * length, n_heads * head_dim + 16), torch.nan, device=DEVICE, dtype=torch.float16)
    seen = out[:, : n_heads * head_dim]
    prefix_attention(rows, seen, length, n_heads, n_kv_heads, head_dim, Tile(64, 64, 2, 4))
    every = rows[:, :width].float().view(images, length, -1, head_dim).transpose(1, 2)
    q, k, v = every.split([n_heads, n_kv_heads, n_kv_heads], dim=1)
    wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=n_heads != n_kv_heads).transpose(1, 2)
    assert far(seen, wanted.reshape(seen.shape)) < 1e-3
    assert out[:, n_heads * head_dim :].isnan().all()
