"""Attention of prompts, a sequence at a time and a row at a time. On a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.models.moondream.config import TextConfig
from saccade.engine.models.moondream.text import rotation_table
from tests.support.engine.kernels import DEVICE, far, needs_triton

pytestmark = needs_triton
N_HEADS, HEAD_DIM, PAGE, PREFIX = 4, 64, 16, 82


@torch.inference_mode()
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_sequences_see_what_their_rows_see(n_kv_heads: int) -> None:
    from saccade.engine.kernels.paged_attention import PagedAttention
    from saccade.engine.kernels.prefill.prompt_attention import prompt_attention

    config = TextConfig(dim=N_HEADS * HEAD_DIM, n_heads=N_HEADS, max_context=192, prefix_attn=PREFIX)
    angles = [table.to(DEVICE) for table in rotation_table(config)]
    attention = PagedAttention(N_HEADS, n_kv_heads, HEAD_DIM, PAGE, PREFIX, -PREFIX % PAGE, *angles)
    lengths = [4, 5, 11, 1, 3]
    owners = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)], dtype=torch.int32)
    positions = torch.tensor([PREFIX + at for length in lengths for at in range(length)], dtype=torch.int32)
    shape = 64, n_kv_heads, PAGE, HEAD_DIM
    keys, values = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for _ in range(2))
    tables = torch.randint(1, 64, (len(lengths), 12), dtype=torch.int32, device=DEVICE)
    width = (N_HEADS + 2 * n_kv_heads) * HEAD_DIM
    heads = torch.randn(len(owners), width + 32, device=DEVICE, dtype=torch.float16)[:, :width]
    wanted, got = (torch.full((len(owners), N_HEADS * HEAD_DIM), torch.nan).to(heads) for _ in range(2))
    arguments = heads, positions.to(DEVICE), owners.to(DEVICE), tables, keys, values
    attention.attend(*arguments, wanted, write=False)
    prompt_attention(attention, *arguments, got)
    assert far(got, wanted) < 1e-3
