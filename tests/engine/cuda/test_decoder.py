"""Our kernels against the model's own modules, in bfloat16. Runs where there is a GPU: see test_cuda_executor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from saccade.engine.cuda import image_attention
from saccade.engine.cuda.paged_cache import PagedCache
from saccade.engine.errors import Fallbacks
from saccade.engine.models.lora import AdapterBank
from saccade.engine.models.moondream.config import (
    ExpertsConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    VisionConfig,
)
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.region import size_bin
from saccade.engine.models.moondream.vision import normalize
from saccade.engine.models.protocol import Adapter, Phase
from saccade.engine.models.quantization import (
    dequantize,
    dequantize_kv,
    fp8_linear,
    quantize,
    quantize_kv,
    round_to_fp8,
)
from saccade.engine.models.runner import Runner
from tests.support.engine import random_model

pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

PAGE, WIDTH = 16, 12
TEXT = TextConfig(
    dim=256, ff_dim=1792, n_layers=3, vocab_size=512, max_context=192, n_heads=4, n_kv_heads=4, prefix_attn=82
)
VISION = VisionConfig(
    enc_dim=144, enc_n_layers=2, enc_ff_dim=288, enc_n_heads=2, proj_out_dim=256, crop_size=126, proj_inner_dim=256
)
REGION = RegionConfig(dim=256, coord_feat_dim=64, coord_out_dim=128, size_feat_dim=128, size_out_dim=256, inner_dim=512)


@pytest.fixture(autouse=True)
def own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention within images, too, in our kernel where it runs: such small ones are not left to torch."""
    with suppress(ImportError):
        monkeypatch.setattr("saccade.engine.kernels.image_attention.MIN_TOKENS", 65)
    image_attention._tried.cache_clear()


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


EXPERTS = ExpertsConfig(num_experts=16, start_layer=1, experts_per_token=4, expert_inner_dim=256)


class Pair:
    """A model, its plain runner and its packed one, over caches of the same noise."""

    def __init__(
        self,
        n_kv_heads: int = 4,
        fp8: bool = False,
        experts: bool = False,
        kv_dtype: str | None = None,
        packed_experts: bool = False,
    ) -> None:
        from saccade.engine.cuda.decoder import PackedRunner
        from saccade.engine.cuda.layers import supports

        text, region = replace(TEXT, n_kv_heads=n_kv_heads), REGION
        if experts:
            text = replace(text, n_heads=8, n_kv_heads=8, moe=EXPERTS, tau=1)
            region = replace(region, inner_dim=0, reads="post_ln_ln")
        config = MoondreamConfig(text=text, vision=VISION, region=region)
        self.model: Moondream = random_model(config).to("cuda", torch.bfloat16)
        if fp8:
            round_to_fp8(self.model)
        codes = experts_to_fp8(self.model) if packed_experts else []
        assert supports(self.model)
        self.pools = [PagedCache(self.model, 256, PAGE, kv_dtype) for _ in range(2)]
        noise = torch.randn(2, *self.pools[0].keys.shape, device="cuda").bfloat16()
        fill(self.pools, noise)
        self.exact: Runner | None = None
        if experts:
            whole = copy.deepcopy(self.model).float()
            self.pools.append(PagedCache(whole, 256, PAGE))
            fill(self.pools[2:], noise)
            self.exact = Runner(whole, self.pools[2])
        for layer, parts, scales in codes:  # the other weights stay in half precision
            layer.fc1.weight.data, layer.fc2.weight.data = parts
            layer.scales = scales
        self.plain = Runner(self.model, self.pools[0])
        # Of its own: in FP8 it leaves a model's modules without numbers that they can compute with.
        self.packed = PackedRunner(copy.deepcopy(self.model), self.pools[1], 128, Fallbacks())

    def alike(
        self,
        got: torch.Tensor | None,
        wanted: torch.Tensor | None,
        limit: float,
        exactly: Callable[[Runner], torch.Tensor | None],
    ) -> bool:
        """Outputs and caches of both. With experts, each is as near to what float32 gives as the other is.

        Two experts may be as good as each other, and then a rounding decides which one a row goes through.
        """
        if self.exact is None:
            return self.caches_apart() < limit and (got is None or wanted is None or far(got, wanted) < limit)
        exact = exactly(self.exact)
        pairs = [(pool.keys[:, 1:], pool.values[:, 1:]) for pool in self.pools]
        both = [((got, wanted), exact), *zip(zip(pairs[1], pairs[0], strict=True), pairs[2], strict=True)]
        return all(
            one is None or other is None or truth is None or far(one, truth) < 1.5 * far(other, truth) + limit / 2
            for (one, other), truth in both
        )

    def caches_apart(self) -> float:
        a, b = (held(pool) for pool in self.pools[:2])
        return max(far(theirs[:, 1:], mine[:, 1:]) for mine, theirs in zip(a, b, strict=True))


def experts_to_fp8(model: Moondream) -> list[tuple[Experts, list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    """Round a model's experts to FP8; each layer's codes and scales."""
    found = []
    for layer in model.modules():
        if isinstance(layer, Experts):
            pairs = [[quantize(one) for one in part.weight] for part in (layer.fc1, layer.fc2)]
            for part, own in zip((layer.fc1, layer.fc2), pairs, strict=True):
                part.weight.copy_(torch.stack([dequantize(*one, part.weight.dtype) for one in own]))
            codes = [torch.stack([code for code, _ in own]) for own in pairs]
            first, second = (torch.stack([scale for _, scale in own]) for own in pairs)
            found.append((layer, codes, (first, second)))
    return found


def fill(pools: list[PagedCache], noise: torch.Tensor) -> None:
    """Put keys and values, (2, n_layers, …), into caches of any dtype."""
    for pool in pools:
        for number, (keys, values, *scales) in enumerate(pool.layers):
            for into, of, x in zip((keys, values), scales, noise[:, number], strict=True):
                if of is None:
                    into.copy_(x)
                else:
                    packed, scale = quantize_kv(x)
                    into.copy_(packed)
                    of.copy_(scale)


def held(pool: PagedCache) -> list[torch.Tensor]:
    """All keys and all values of a cache, as what they stand for."""
    keys, values, *scales = zip(*pool.layers, strict=True)
    return [
        torch.stack([x if of is None else dequantize_kv(x, of, torch.float32) for x, of in zip(part, its, strict=True)])
        for part, its in zip((keys, values), scales, strict=True)
    ]


def numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def tables(rows: int) -> torch.Tensor:
    """Six shared prefix pages, then private ones."""
    own = torch.zeros(rows, WIDTH, dtype=torch.int32, device="cuda")
    own[:, :6] = torch.arange(1, 7)
    for row in range(rows):
        own[row, 6:9] = torch.arange(7 + 3 * row, 10 + 3 * row)
    return own


@torch.inference_mode()
@pytest.mark.parametrize(
    ("n_kv_heads", "fp8", "experts", "kv_dtype", "packed_experts"),
    [
        (4, False, False, None, False),
        (2, False, False, None, False),
        (4, True, False, None, False),
        (8, False, True, None, False),
        (8, True, True, None, False),
        (8, False, True, None, True),
        (2, False, False, "fp8", False),
        (4, True, False, "fp8", False),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 16, 40, 64, 70])
def test_a_step_agrees_with_the_modules(
    rows: int, n_kv_heads: int, fp8: bool, experts: bool, kv_dtype: str | None, packed_experts: bool
) -> None:
    pair = Pair(n_kv_heads, fp8, experts, kv_dtype, packed_experts)
    at = numbers([82 + row * 2 % 40 for row in range(rows)])
    batch_slots = numbers([*range(rows)])
    own = tables(rows)
    # A rounding decides which of two FP8 numbers a key becomes: .009 to .027 in 180 random steps on an H200.
    limit = 0.01 if kv_dtype is None else 0.04
    if fp8 and rows > 64:  # activations are rounded, too
        limit += 0.3 if experts else 0.11  # which chooses other experts

    def agrees() -> bool:
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        step = at, batch_slots, own, False
        wanted, got = (one.forward_tokens(x.clone(), *step) for one in (pair.plain, pair.packed))
        return pair.alike(got, wanted, limit, lambda exact: exact.forward_tokens(x.float(), *step))

    # One row of 13 meets two experts as good as each other: not three in succession.
    assert any(agrees() for _ in range(3 if experts else 1))


@torch.inference_mode()
@pytest.mark.parametrize(("experts", "kv_dtype"), [(False, None), (True, None), (False, "fp8"), (True, "fp8")])
@pytest.mark.parametrize(("rows", "fp8"), [(1, False), (8, False), (64, False), (1, True), (8, True), (64, True)])
def test_kernels_under_pdl_read_nothing_too_early(rows: int, fp8: bool, experts: bool, kv_dtype: str | None) -> None:
    pair = Pair(fp8=fp8, experts=experts, kv_dtype=kv_dtype)
    if not pair.packed._pdl:
        pytest.skip("this GPU launches one kernel after the other")
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    at, batch_slots, own = numbers([82 + row * 2 % 40 for row in range(rows)]), numbers([*range(rows)]), tables(rows)
    phases = numbers([row % 3 for row in range(rows)])
    sampled, state = torch.zeros(rows, 3, device="cuda"), torch.zeros(rows, 256, device="cuda", dtype=torch.bfloat16)

    def step(begin: torch.Tensor) -> torch.Tensor:
        hidden = pair.packed.forward_tokens(begin, at, batch_slots, own, False)
        pair.packed.sample_regions(hidden, phases, batch_slots, True, True, sampled, state)
        return hidden

    for part in (pair.packed, pair.packed._coords, pair.packed._sizes):
        part._pdl = False
    wanted = [tensor.clone() for tensor in (step(x.clone()), sampled, state)]
    for part in (pair.packed, pair.packed._coords, pair.packed._sizes):
        part._pdl = True
    held, graph = x.clone(), torch.cuda.CUDAGraph()
    step(held)
    with torch.cuda.graph(graph):
        got = step(held)
    for _ in range(200):
        held.copy_(x)
        sampled.zero_()
        state.zero_()
        graph.replay()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip((got, sampled, state), wanted, strict=True))


@torch.inference_mode()
def test_a_prompt_longer_than_the_scratch_is_read_in_pieces() -> None:
    pair = Pair()
    longest = TEXT.max_context - TEXT.prefix_attn
    own = torch.zeros(1, 6 + longest // PAGE + 1, dtype=torch.int32, device="cuda")
    own[0] = torch.arange(1, own.shape[1] + 1)
    pair.packed = type(pair.packed)(pair.model, pair.pools[1], 48, Fallbacks())
    x = torch.randn(longest, 256, device="cuda", dtype=torch.bfloat16)
    at, owners = numbers([*range(82, 82 + longest)]), numbers([0] * longest)
    wanted = pair.plain.forward_tokens(x.clone(), at, owners, own, True)
    assert far(pair.packed.forward_tokens(x.clone(), at, owners, own, True), wanted) < 0.01
    assert pair.caches_apart() < 0.01


@torch.inference_mode()
@pytest.mark.parametrize(
    ("experts", "kv_dtype", "packed_experts"),
    [(False, None, False), (True, None, False), (True, None, True), (False, "fp8", False)],
)
@pytest.mark.parametrize(("fp8", "limit"), [(False, 0.01), (True, 0.1)])  # in FP8 activations are rounded, too
@pytest.mark.parametrize("asked", [0, 9])
def test_images_and_prompts_together_agree_with_the_modules(
    asked: int, fp8: bool, limit: float, experts: bool, kv_dtype: str | None, packed_experts: bool
) -> None:
    pair = Pair(fp8=fp8, experts=experts, kv_dtype=kv_dtype, packed_experts=packed_experts)
    limit += 0.02 if kv_dtype else 0.0  # a rounding decides which of two numbers a key becomes
    images = torch.randn(2, 82, 256, device="cuda", dtype=torch.bfloat16)
    prefixes = torch.stack([torch.arange(1, 7), torch.arange(40, 46)]).int().cuda()
    own = tables(2)
    own[1, :6] = prefixes[1]
    x = torch.randn(asked, 256, device="cuda", dtype=torch.bfloat16) if asked else None
    at, owners = numbers([82, 83, 84, 85, 82, 83, 84, 85, 86]), numbers([0] * 4 + [1] * 5)
    wanted = pair.plain.prefill(images, prefixes, x, at, owners, own)
    got = pair.packed.prefill(images.clone(), prefixes, None if x is None else x.clone(), at, owners, own)
    prompts = None if x is None else x.float()
    limit *= 3 if fp8 and experts else 1  # rounded activations choose other experts
    assert pair.alike(
        got, wanted, limit, lambda exact: exact.prefill(images.float(), prefixes, prompts, at, owners, own)
    )
    if asked:
        assert got is not None
    else:
        assert got is None


@torch.inference_mode()
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("fp8", "limit"), [(False, 0.02), (True, 0.1)])
def test_rows_with_adapters_agree_with_the_modules(fp8: bool, limit: float, experts: bool) -> None:
    pair = Pair(fp8=fp8, experts=experts)
    text = pair.model.text
    bank = AdapterBank(text, 2, 8)
    parts = ["attn.qkv", "attn.proj"] + ([] if experts else ["mlp.fc1", "mlp.fc2"])
    weights = {}
    for number, block in enumerate(text.blocks):
        for part in parts:
            out, inner = block.get_submodule(part).weight.shape
            matrices = torch.randn(4, inner) * 0.05, torch.randn(out, 4) * 0.2
            weights[number, part] = matrices[0].to(pair.model.device), matrices[1].to(pair.model.device)
    bank.fill(2, Adapter("a", weights))
    plain, packed = (runner.with_adapters(bank, numbers([2, 0, 2])) for runner in (pair.plain, pair.packed))
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    at, owners, own = numbers([82, 84, 86]), numbers([0, 1, 2]), tables(3)
    wanted = plain.forward_tokens(x.clone(), at, owners, own, False)
    assert far(packed.forward_tokens(x.clone(), at, owners, own, False), wanted) < limit
    assert far(pair.packed.forward_tokens(x.clone(), at, owners, own, False)[0], wanted[0]) > 0.1
    slots = numbers([2, 0, 0, 2])
    plain, packed = (runner.with_adapters(bank, slots) for runner in (pair.plain, pair.packed))
    images, prefixes = torch.randn(2, 82, 256, device="cuda", dtype=torch.bfloat16), own[:2, :6].contiguous()
    prefixes[1] += 60
    prompts, owners = x[:2], numbers([0, 1])
    own[1, :6] = prefixes[1]
    wanted = plain.prefill(images, prefixes, prompts.clone(), at[:2], owners, own)
    got = packed.prefill(images.clone(), prefixes, prompts.clone(), at[:2], owners, own)
    assert got is not None
    assert wanted is not None
    assert far(got, wanted) < limit * (3 if experts else 1)  # a rounding may choose other experts


@torch.inference_mode()
@pytest.mark.parametrize("packed_experts", [False, True])
def test_adapters_of_experts_are_what_merged_weights_give(packed_experts: bool) -> None:
    torch.manual_seed(0)
    pair = Pair(experts=True, packed_experts=packed_experts)
    text, weights = pair.model.text, {}
    assert pair.exact is not None
    for number, part in ((1, "mlp.fc1"), (1, "mlp.fc2"), (2, "mlp.fc1"), (2, "mlp.fc2"), (0, "attn.qkv")):
        *expert, out, inner = text.blocks[number].get_submodule(part).weight.shape
        a, b = torch.randn(*expert, 2, inner) * 0.1, torch.randn(*expert, out, 2) * 0.3
        weights[number, part] = a.cuda().bfloat16(), b.cuda().bfloat16()
        merged = pair.exact._model.text.get_submodule(f"blocks.{number}.{part}").weight
        assert isinstance(merged, torch.Tensor)
        merged += weights[number, part][1].float() @ weights[number, part][0].float()
    # The bank is of the model that the kernels run, whose modules share their weights.
    bank = AdapterBank(pair.packed._model.text, 2, 8)
    bank.fill(2, Adapter("a", weights))
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    at, owners, own = numbers([82, 84, 86]), numbers([0, 1, 2]), tables(3)
    adapted = pair.packed.with_adapters(bank, numbers([2, 0, 2])).forward_tokens(x.clone(), at, owners, own, False)
    wanted = pair.exact.forward_tokens(x.float(), at, owners, own, False)
    plain = pair.plain.forward_tokens(x.clone(), at, owners, own, False)
    # Half of the rows may meet two experts as good as each other.
    distances = sorted((far(adapted[0], wanted[0]), far(adapted[2], wanted[2]), far(adapted[1], plain[1])))
    assert distances[1] < 0.05, distances
    assert min(far(plain[0], wanted[0]), far(plain[2], wanted[2])) > 0.05
    images = torch.randn(2, 82, 256, device="cuda", dtype=torch.bfloat16)
    prefixes = torch.stack([torch.arange(1, 7), torch.arange(40, 46)]).int().cuda()
    own[1, :6] = prefixes[1]
    runner, place = pair.packed.with_adapters(bank, numbers([2, 0, 2, 0])), (numbers([82, 82]), numbers([0, 1]), own)
    got = runner.prefill(images, prefixes, x[:2].clone(), *place)
    truth = pair.exact.prefill(images.float(), prefixes, x[:2].float(), *place)
    other = pair.plain.prefill(images, prefixes, x[:2].clone(), *place)
    assert got is not None
    assert truth is not None
    assert other is not None
    assert min(far(got[0], truth[0]), far(got[1], other[1])) < 0.1
    assert max(far(got[0], truth[0]), far(got[1], other[1])) < 0.3


@torch.inference_mode()
@pytest.mark.parametrize("experts", [False, True])
def test_samples_agree_with_the_modules(experts: bool) -> None:
    pair, batch_slots = Pair(experts=experts), numbers([*range(12)])
    region = pair.model.region
    hidden = torch.randn(12, 256, device="cuda", dtype=torch.bfloat16)
    phases = numbers([Phase.X_OR_EOS, Phase.Y, Phase.SIZE] * 4)
    plain, sampled = (torch.zeros(12, 3, device="cuda") for _ in range(2))
    state = torch.zeros(13, 256, device="cuda", dtype=torch.bfloat16)
    pair.plain.sample_regions(hidden, phases, batch_slots, True, True, plain, torch.zeros_like(state))
    pair.packed.sample_regions(hidden, phases, batch_slots, True, True, sampled, state)
    begins, places, sizes = phases == Phase.X_OR_EOS, phases != Phase.SIZE, phases == Phase.SIZE
    torch.testing.assert_close(sampled[begins, 0], plain[begins, 0], atol=3e-2, rtol=2e-2)
    # The modules round scores to bfloat16, in which the two best may be the same: the best by far is not asked for.
    scores = region.decode_coord(hidden)[places].float()
    assert nearly_best(scores, (sampled[places, 1] * scores.shape[-1]).round().long())
    spread = region.decode_size(hidden)[sizes].float()
    assert nearly_best(spread, size_bin(sampled[sizes, :2], spread.shape[-1]))
    assert far(state[:12][places], region.encode_coord(sampled[places, 1:2])) < 0.01
    assert far(state[:12][sizes], region.encode_size(sampled[sizes, :2])) < 0.01
    assert far(pair.packed.logits(hidden), pair.plain.logits(hidden)) < 0.01


def nearly_best(scores: torch.Tensor, bins: torch.Tensor) -> bool:
    picked = scores.gather(-1, bins.unsqueeze(-1)).squeeze(-1)
    return bool((picked >= scores.amax(-1) - 0.01 * scores.abs().amax(-1)).all())


@torch.inference_mode()
@pytest.mark.parametrize(("fp8", "limit"), [(False, 0.02), (True, 0.1)])
def test_the_tower_agrees_with_the_modules(fp8: bool, limit: float) -> None:
    from saccade.engine.cuda.vision import PackedVision

    model = Pair(fp8=fp8).model
    crops = torch.randint(0, 256, (3, 126, 126, 3), dtype=torch.uint8, device="cuda")
    pixels = normalize(crops, torch.bfloat16)
    features = model.vision.features(pixels)
    others = features.flip(0)
    alone, beside = model.vision.project(features, features), model.vision.project(features, others)
    packed = PackedVision(model, Fallbacks())
    assert far(packed.features(pixels), features) < limit
    assert far(packed.project(features, features), alone) < 0.01  # with half of the weights
    assert far(packed.project(features, others), beside) < 0.01  # with its GELU in the product
    assert far(model.vision.project(features, others), beside) < 0.01  # as images of several crops are joined


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("rows", "split_k"), [(1, 1), (1, 4), (16, 8), (33, 1), (64, 8)])
def test_products_of_few_rows(rows: int, split_k: int, fp8: bool) -> None:
    from saccade.engine.kernels.skinny_gemm import skinny_gemm

    weight, scale = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16) / 45, None
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    packed = weight
    if fp8:
        packed, scale = quantize(weight)
        weight = dequantize(packed, scale, torch.float32)
    wanted = x.float() @ weight.float().t()
    out = torch.empty(split_k, rows, 256, device="cuda") if split_k > 1 else torch.empty(rows, 256, device="cuda")
    skinny_gemm(x, packed, out, scale=scale)
    assert far(out.sum(0) if split_k > 1 else out, wanted) < 1e-5


@torch.inference_mode()
def test_rows_are_quantized_as_weights_are() -> None:
    from saccade.engine.kernels.norm_quantize import quantize_rows

    plain, pre_gelu = (torch.randn(9, width, device="cuda", dtype=torch.bfloat16) for width in (96, 320))
    joined = torch.cat([plain.float(), F.gelu(pre_gelu.float(), approximate="tanh")], dim=1)
    quantized = quantize_rows(plain, pre_gelu)
    assert far(dequantize(*quantized, torch.float32), joined) < 0.04
    assert far(dequantize(*quantized, torch.float32), dequantize(*quantize(joined), torch.float32)) < 0.01
    packed, scale = quantize(torch.randn(160, 416, device="cuda"))
    bias = torch.randn(160, device="cuda", dtype=torch.bfloat16)
    wanted = dequantize(*quantized, torch.float32) @ dequantize(packed, scale, torch.float32).t() + bias.float()
    assert far(fp8_linear(*quantized, packed, scale, bias), wanted) < 0.01
