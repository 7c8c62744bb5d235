"""Attention over pages, and what is written to them, against plain operations on a cache of the same numbers.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from saccade.engine.cuda.paged_cache import PagedCache, PagedLayer, PagedRows
from saccade.engine.models.moondream.config import TextConfig
from saccade.engine.models.moondream.text import rotate, rotation_table
from tests.support.engine import TINY, random_model
from tests.support.engine.kernels import DEVICE, E4M3_LIMIT, far, needs_triton

pytestmark = needs_triton
PAGE, PREFIX, LONGEST, HEADS = 16, 42, 100, 4
POSITIONS, OWNERS = [42, 60, 99, 43], [0, 1, 2, 0]
SHAPES = [(4, 64, None), (2, 24, None), (4, 64, "fp8"), (2, 24, "fp8")]


@dataclass(slots=True)
class Case:
    """Two caches of the same noise, rows behind what they hold, and what the model would do with these."""

    caches: list[PagedCache]
    tables: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    heads: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor
    temperature: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, kv_heads: int, head_dim: int, kv_dtype: str | None, tempered: bool = False) -> Case:
        torch.manual_seed(0)
        limits = replace(
            random_model(TINY).limits,
            n_layers=1,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            prefix_length=PREFIX,
            max_context=LONGEST,
        )
        model: Any = SimpleNamespace(limits=limits, dtype=torch.float16, device=torch.device(DEVICE))
        caches = [PagedCache(model, 32, PAGE, kv_dtype) for _ in range(2)]
        tables = torch.randperm(31)[:24].view(3, 8).to(DEVICE, torch.int32) + 1
        tables[:, :3] = tables[0, :3]
        rows = len(POSITIONS)
        k, v = (torch.randn(3, LONGEST, kv_heads, head_dim, device=DEVICE).half() for _ in range(2))
        k[..., 5] += 5
        k[:, :PREFIX], v[:, :PREFIX] = k[:1, :PREFIX], v[:1, :PREFIX]
        every = torch.arange(LONGEST, device=DEVICE).expand(3, -1)
        for cache in caches:
            PagedRows(cache, tables.long()).layers(every)[0].write(k, v)
        angles = rotation_table(TextConfig(dim=HEADS * head_dim, n_heads=HEADS, max_context=LONGEST))
        cosine, sine = (part.to(DEVICE) for part in angles)
        heads = torch.randn(rows, (HEADS + 2 * kv_heads) * head_dim, device=DEVICE).half()
        at, owners = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (POSITIONS, OWNERS))
        products = torch.randn(3, rows, 2 * HEADS, device=DEVICE), torch.randn(HEADS, device=DEVICE)
        return cls(caches, tables, (cosine, sine), heads, at, owners, products if tempered else None)

    @property
    def kernels(self) -> Any:
        from saccade.engine.kernels.paged_attention import PagedAttention

        cache = self.caches[1]
        kv_heads, dim = cache.keys.shape[2], cache.keys.shape[4]
        return PagedAttention(HEADS, kv_heads, dim, PAGE, PREFIX, cache.gap, *self.rotation)

    def write(self, layer: PagedLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        """As the kernels do: rounded once."""
        quantized = self.caches[0].layers[0][2] is not None
        layer.write(*((k, v) if quantized else (k.half(), v.half())))

    def plain(self) -> tuple[PagedLayer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first cache as the rows see it, their queries, keys and values, and which keys each sees."""
        rows = PagedRows(self.caches[0], self.tables[self.owners.long()].long())
        at = self.positions.long().unsqueeze(1)
        kv_heads, dim = self.caches[0].keys.shape[2], self.caches[0].keys.shape[4]
        q, k, v = self.heads.float().view(len(at), 1, -1, dim).split([HEADS, kv_heads, kv_heads], dim=2)
        rotation = [part[at].unsqueeze(2) for part in self.rotation]
        q, k = rotate(q, (rotation[0], rotation[1])), rotate(k, (rotation[0], rotation[1]))
        if self.temperature is not None:
            products, alpha = self.temperature
            by_position = 0.5 + torch.sigmoid(alpha * torch.log(at + 1.0))
            for_q, for_v = (torch.tanh(products.sum(0)).view(-1, 2, HEADS) + by_position.unsqueeze(1)).unbind(1)
            q, v = q * for_q[:, None, :, None], v * for_v[:, None, :, None]
        return rows.layers(at)[0], q, k, v, (rows.key_positions <= at.unsqueeze(-1)).unsqueeze(1)

    def apart(self) -> float:
        """How far the caches are from each other, in what their cells stand for."""
        every = torch.arange(LONGEST, device=DEVICE).expand(3, -1)
        one, other = (PagedRows(cache, self.tables.long()).layers(every)[0].read() for cache in self.caches)
        return max(far(mine, theirs) for mine, theirs in zip(other, one, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(("kv_heads", "head_dim", "kv_dtype"), SHAPES)
def test_rows_attend_to_their_pages(kv_heads: int, head_dim: int, kv_dtype: str | None, write: bool) -> None:
    case = Case.of(kv_heads, head_dim, kv_dtype, tempered=kv_heads == HEADS)
    if write:  # then no two rows are of one sequence
        case.heads, case.positions, case.owners = case.heads[:3], case.positions[:3], case.owners[:3]
        case.temperature = case.temperature and (case.temperature[0][:, :3].contiguous(), case.temperature[1])
    layer, q, k, v, seen = case.plain()
    case.write(layer, k, v)
    keys, values = (part.float() for part in layer.read())
    wanted = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True)
    out = torch.empty(len(q), HEADS * head_dim, device=DEVICE, dtype=torch.float16)
    rows, cache = (case.positions, case.owners, case.tables), case.caches[1].layers[0]
    if not write:
        case.kernels.write_kv(case.heads, *rows, cache, temperature=case.temperature)
    case.kernels.attend(case.heads, *rows, cache, out, write=write, temperature=case.temperature)
    assert far(out, wanted.flatten(1)) < 0.02
    assert case.apart() < E4M3_LIMIT


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
def test_a_product_beside_attention_changes_neither(fp8: bool) -> None:
    from saccade.engine.kernels.gemv import Beside
    from saccade.engine.models.quantization import quantize

    case = Case.of(4, 64, None)
    rows = case.positions[:1], case.owners[:1], case.tables
    whole = torch.randn(64, 128 + 144, device=DEVICE).half()
    packed = quantize(whole)[0] if fp8 else whole
    x, product = torch.randn(1, 144, device=DEVICE).half(), torch.full((64,), torch.nan, device=DEVICE)
    alone, both = torch.empty(2, 1, HEADS * 64, device=DEVICE, dtype=torch.float16)
    beside = Beside(x, packed[:, 128:], product, 2)
    case.kernels.attend(case.heads[:1], *rows, case.caches[0].layers[0], alone, write=True)
    case.kernels.attend(case.heads[:1], *rows, case.caches[1].layers[0], both, write=True, beside=beside)
    assert torch.equal(both, alone)
    assert far(product, packed[:, 128:].float() @ x[0].float()) < 1e-5
