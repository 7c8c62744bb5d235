from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from saccade.engine.cpu.decoder import CpuPagedCache, CpuPagedRows, FusedDecoder
from saccade.engine.golden.reference import DenseCache
from saccade.engine.models.moondream.text import Block, TextDecoder
from tests.support.engine import TINY, TINY_3, one_thread, random_model
from tests.support.engine.onednn import needs_bfloat16

PAGE = 5  # the prefix of 17 leaves a part of its last page unused
PREFIX = TINY.text.prefix_attn
MODEL = random_model(TINY)
MODELS = {"dense": MODEL, "experts": random_model(TINY_3)}


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize(
    ("fused", "dtype", "tolerance"),
    [(False, torch.float32, 1e-5), (True, torch.float32, 1e-5), (True, torch.bfloat16, 0.05)],
)
@torch.inference_mode()
def test_scattered_pages_give_what_a_dense_cache_gives(
    fused: bool, dtype: torch.dtype, tolerance: float, kind: str
) -> None:
    """Two sequences share an image's pages, a third has its own; they go on from different positions."""
    plain = MODELS[kind]
    model = copy.deepcopy(plain).to(dtype)
    model.text.cosine, model.text.sine = plain.text.cosine, plain.text.sine
    pool = CpuPagedCache(model, 40, PAGE)
    text: FusedDecoder | TextDecoder = FusedDecoder(model.text) if fused else model.text
    images, prompts, token = random(2, PREFIX, TINY.text.dim), random(3, 7, TINY.text.dim), random(3, 1, TINY.text.dim)
    given = [x.to(dtype) for x in (images, prompts, token)]
    prefixes = torch.tensor([[9, 2, 31, 4], [12, 7, 8, 20]])
    table = torch.cat([prefixes[[0, 0, 1]], torch.tensor([[1, 15], [3, 30], [16, 5]])], dim=1)
    text.write_kv(given[0], CpuPagedRows(pool, prefixes, PREFIX))
    at = PREFIX + torch.arange(7).expand(3, -1)
    cache = CpuPagedRows(pool, table, PREFIX + 7)
    read = text(given[1], at, cache, cache.before(at))
    lengths = torch.tensor([[7], [4], [1]])  # what is behind a shorter prompt is written over
    cache = CpuPagedRows(pool, table, PREFIX + 8)
    last = text(given[2], PREFIX + lengths, cache, cache.before(PREFIX + lengths))
    for row, (image, length) in enumerate(zip((0, 0, 1), lengths[:, 0].tolist(), strict=True)):
        own = torch.cat([images[image], prompts[row, :length], token[row]]).unsqueeze(0)
        dense = DenseCache.empty(plain.limits, 1, own.shape[1], own)
        wanted = plain.text(own, torch.arange(own.shape[1]).unsqueeze(0), dense)[0, PREFIX:]
        got = torch.cat([read[row, :length], last[row]])
        assert (got - wanted).abs().mean() < tolerance * wanted.abs().mean()


def test_a_step_reads_as_many_pages_as_its_longest_sequence() -> None:
    pool = CpuPagedCache(MODEL, 40, PAGE)
    wanted = {PREFIX: 4, PREFIX + 1: 5, PREFIX + PAGE: 5, PREFIX + PAGE + 1: 6}
    assert {position: pool.pages_upto(position) for position in wanted} == wanted


def test_joined_weights_are_held_once_and_change_no_output() -> None:
    text = copy.deepcopy(MODEL.text).requires_grad_()
    fused = FusedDecoder(text)
    products = [product for layer in fused._layers for product in (layer.into, layer.into_kv, layer.out)]
    assert not any(part.requires_grad for product in products for part in (product.weight, product.bias))
    held = {part.untyped_storage().data_ptr() for part in text.parameters()}
    block = text.blocks[0]
    assert isinstance(block, Block)
    assert block.attn.qkv.weight.untyped_storage().data_ptr() == block.mlp.fc1.weight.untyped_storage().data_ptr()
    assert len(held) == len(list(text.parameters())) - 2 * len(text.blocks)
    x, positions = random(1, PREFIX + 3, TINY.text.dim), torch.arange(PREFIX + 3).unsqueeze(0)
    with torch.inference_mode():
        assert torch.allclose(text(x, positions), MODEL.text(x, positions), atol=1e-5)


@needs_bfloat16
@torch.inference_mode()
def test_prefixes_can_be_rounded_and_nothing_else() -> None:
    model = copy.deepcopy(MODEL)
    exact, rounded = FusedDecoder(model.text), FusedDecoder(model.text, torch.bfloat16)
    pages = torch.tensor([[9, 2, 31, 4]])
    caches = [CpuPagedCache(model, 40, PAGE) for _ in range(2)]
    image, prompt, at = random(1, PREFIX, TINY.text.dim), random(1, 3, TINY.text.dim), PREFIX + torch.arange(3)[None]
    for text, cache in zip((exact, rounded), caches, strict=True):
        text.write_kv(image, CpuPagedRows(cache, pages, PREFIX))
    wanted, got = (cache.both for cache in caches)
    assert 1e-4 < (got - wanted).norm() / wanted.norm() < 2e-2
    rows = CpuPagedRows(caches[0], torch.cat([pages, torch.tensor([[5]])], dim=1), PREFIX + 3)
    hidden = [text(prompt, at, rows, rows.before(at)) for text in (exact, rounded)]
    assert torch.equal(*hidden)
