"""Attention of prompts over pages against plain formulas. Runs on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.support.engine.kernels import DEVICE, far, needs_triton

pytestmark = needs_triton
PAGE, PREFIX, D, CONTEXT = 8, 21, 32, 128
GAP = -PREFIX % PAGE


def numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """(rows, heads, D) with the first half turned, by angles (rows, D / 4)."""
    half = D // 4
    a, b = x[..., :half], x[..., half : 2 * half]
    c, s = cosine.unsqueeze(1), sine.unsqueeze(1)
    return torch.cat([a * c - b * s, b * c + a * s, x[..., 2 * half :]], dim=-1)


@torch.inference_mode()
@pytest.mark.parametrize(
    "lengths", [[8], [1, 5, 3, 7], [30, 2, 16], [3] * 22], ids=["one", "few", "longer than a block", "many"]
)
@pytest.mark.parametrize(("n_heads", "n_kv", "parts", "pre_gelu"), [(4, 2, 0, 0), (2, 2, 3, 0), (2, 2, 0, 40)], ids=str)
def test_prompts_see_their_images_and_what_is_before(
    lengths: list[int], n_heads: int, n_kv: int, parts: int, pre_gelu: int
) -> None:
    from saccade.engine.kernels.paged_attention import PagedAttention

    torch.manual_seed(len(lengths))
    rows, filled = sum(lengths), 2
    angle = torch.rand(CONTEXT, D // 4, device=DEVICE) * 6
    cosine, sine = angle.cos(), angle.sin()
    attention = PagedAttention(n_heads, n_kv, D, PAGE, PREFIX, GAP, cosine, sine)
    width = -(-(PREFIX + GAP + max(lengths)) // PAGE)
    n_pages = 1 + len(lengths) * width
    tables = torch.zeros(len(lengths) + 1, width, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(n_pages - 1, device=DEVICE) + 1
    tables[:-1] = order[: len(lengths) * width].view(-1, width)
    keys, values = (torch.randn(n_pages, n_kv, PAGE, D, device=DEVICE).half() for _ in range(2))
    # Behind the prompts come rows that only fill a bucket.
    owners = [number for number, length in enumerate(lengths) for _ in range(length)] + [len(lengths)] * filled
    positions = [PREFIX + i for length in lengths for i in range(length)] + [PREFIX] * filled
    heads = torch.randn(rows + filled, (n_heads + 2 * n_kv) * D + pre_gelu, device=DEVICE).half()
    temperature = None
    factor = torch.ones(rows + filled, n_heads, device=DEVICE)
    where = torch.tensor(positions, device=DEVICE)
    if parts:
        products, alpha = torch.randn(parts, rows + filled, 2 * n_heads, device=DEVICE), torch.rand(n_heads).to(DEVICE)
        temperature = products, alpha
        factor = products.sum(0)[:, :n_heads].tanh() + 0.5 + (alpha * (where + 1.0).log()[:, None]).sigmoid()
    out = torch.full((rows + filled, n_heads * D + pre_gelu), torch.nan, device=DEVICE).half()
    for _ in range(2):  # the second finds what the first has left in the scratch
        attention.attend(
            heads,
            numbers(positions),
            numbers(owners),
            tables,
            (keys, values, None, None),
            out,
            write=False,
            pre_gelu=pre_gelu,
            temperature=temperature,
        )
    q = rotated(heads[:, : n_heads * D].float().view(-1, n_heads, D), cosine[where], sine[where])
    q = (q * factor[:, :, None]).half().float()
    for row in range(rows):
        pages = tables[owners[row]].long()
        cells = [*range(PREFIX), *range(PREFIX + GAP, positions[row] + GAP + 1)]
        k, v = (pool[pages].transpose(0, 1).flatten(1, 2)[:, cells].float() for pool in (keys, values))
        k, v = (one.repeat_interleave(n_heads // n_kv, 0) for one in (k, v))
        weights = (torch.einsum("hd,htd->ht", q[row], k) * D**-0.5).softmax(-1)
        wanted = torch.einsum("ht,htd->hd", weights, v).flatten()
        assert far(out[row, : n_heads * D], wanted) < 0.02, row
    gelu = F.gelu(heads[:, (n_heads + 2 * n_kv) * D :].float(), approximate="tanh")
    assert not pre_gelu or far(out[:rows, n_heads * D :], gelu[:rows]) < 0.01
