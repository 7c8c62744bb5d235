"""What images and tokens leave in the paged cache. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.kernels import E4M3
from saccade.engine.models.quantization import dequantize_kv, quantize_kv
from tests.support.engine.kernels import DEVICE, E4M3_LIMIT, far, needs_triton

pytestmark = needs_triton
PAGE, PREFIX, GAP = 16, 20, 12
PREFIXES, TABLES = [[1, 2], [3, 4]], [[1, 2, 5, 6], [3, 4, 7, 8]]
POSITIONS, OWNERS = [20, 21, 30, 9], [0, 0, 1, 1]  # the last is of a graph that has room for more
TOKENS = 3


@torch.inference_mode()
@pytest.mark.parametrize(("warm", "fp8"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("n_heads", "n_kv", "dim"), [(4, 4, 64), (4, 2, 32), (4, 4, 24)])
def test_images_and_tokens_are_kept_where_they_belong(n_heads: int, n_kv: int, dim: int, warm: bool, fp8: bool) -> None:
    from saccade.engine.kernels.paged_attention import PagedAttention

    if warm and n_kv < n_heads:
        pytest.skip("a temperature needs as many heads for keys as for queries")

    def numbers(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    angles = torch.randn(64, dim // 4, device=DEVICE)
    attention = PagedAttention(n_heads, n_kv, dim, PAGE, PREFIX, GAP, angles.cos(), angles.sin())
    images = len(PREFIXES) * PREFIX
    heads = torch.randn(images + TOKENS, (n_heads + 2 * n_kv) * dim, device=DEVICE)
    before = heads.clone()
    keys, values = torch.zeros(2, 9, n_kv, PAGE, dim, device=DEVICE, dtype=E4M3 if fp8 else torch.float32)
    scales = torch.zeros(2, 9, n_kv, PAGE, device=DEVICE, dtype=torch.float16).unbind() if fp8 else (None, None)
    temperature = None
    if warm:
        temperature = torch.randn(3, len(heads), 2 * n_heads, device=DEVICE), torch.randn(n_heads, device=DEVICE)
    rows = numbers(POSITIONS), numbers(OWNERS), numbers(TABLES)
    attention.write_kv(heads, *rows, (keys, values, *scales), prefixes=numbers(PREFIXES), temperature=temperature)

    position = torch.tensor([*range(PREFIX)] * len(PREFIXES) + POSITIONS[:TOKENS], device=DEVICE)
    cosine, sine = angles.cos()[position].unsqueeze(1), angles.sin()[position].unsqueeze(1)
    turned, v = before.view(len(heads), -1, dim).split([n_heads + n_kv, n_kv], dim=1)
    first, second, rest = turned.split([dim // 4, dim // 4, dim - dim // 4 * 2], dim=2)
    q, k = torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=2).split(
        [n_heads, n_kv], dim=1
    )
    if temperature is not None:
        products, alpha = temperature
        by_position = 0.5 + (alpha * (position + 1.0).log().unsqueeze(1)).sigmoid()
        for_q, for_v = (products.sum(0).tanh().view(-1, 2, n_heads) + by_position.unsqueeze(1)).unsqueeze(3).unbind(1)
        q, v = q * for_q, v * for_v
    assert far(heads[:images], torch.cat([q, k, v], dim=1).flatten(1)[:images]) < 1e-5
    assert torch.equal(heads[images:], before[images:])
    pages = [page for image in PREFIXES for page in [image[0]] * PAGE + [image[1]] * (PREFIX - PAGE)]
    pages += [TABLES[owner][(at + GAP) // PAGE] for at, owner in zip(POSITIONS[:TOKENS], OWNERS, strict=False)]
    cell = torch.where(position < PREFIX, position, position + GAP) % PAGE
    for pool, of, wanted in ((keys, scales[0], k), (values, scales[1], v)):
        kept, limit = pool, 1e-5
        if of is not None:
            kept, limit = dequantize_kv(pool, of, torch.float32), E4M3_LIMIT
            wanted = dequantize_kv(*quantize_kv(wanted), torch.float32)
        assert far(kept[torch.tensor(pages, device=DEVICE), :, cell], wanted) < limit
        kept[torch.tensor(pages, device=DEVICE), :, cell] = 0
        assert not kept.any()  # nothing else is written


@torch.inference_mode()
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no warps")
@pytest.mark.parametrize("n_heads", [1, 2, 3, 8])
def test_few_heads_are_stored_alike_every_time(n_heads: int) -> None:
    """Warps that load the same values must load them before one of them stores in place."""
    from saccade.engine.kernels.paged_attention import PagedAttention

    prefix, dim, images = 146, 64, 8
    angles = torch.randn(prefix, dim // 4, device=DEVICE)
    attention = PagedAttention(n_heads, n_heads, dim, PAGE, prefix, 14, angles.cos(), angles.sin())
    heads = torch.randn(images * prefix, 3 * n_heads * dim, device=DEVICE, dtype=torch.bfloat16)
    pages = torch.arange(1, 1 + 10 * images, dtype=torch.int32, device=DEVICE).view(images, 10)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = []
    for _ in range(300):
        keys, values = torch.zeros(2, 1 + 10 * images, n_heads, PAGE, dim, device=DEVICE, dtype=E4M3)
        scales = torch.zeros(2, 1 + 10 * images, n_heads, PAGE, device=DEVICE, dtype=torch.float16)
        attention.write_kv(heads.clone(), none, none, pages, (keys, values, *scales), prefixes=pages)
        found.append(keys.view(torch.uint8))
    assert sum(not torch.equal(one, found[0]) for one in found) == 0
