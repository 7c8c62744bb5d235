from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.golden.reference import DenseCache, Generator
from saccade.engine.models.moondream.config import TextConfig
from saccade.engine.models.moondream.text import TextDecoder, rotate, rotation_table
from tests.support.engine import TINY, one_thread, random_model

PREFIX = TINY.text.prefix_attn
MODEL = random_model(TINY)
TEXT: TextDecoder = MODEL.text


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shake(x: torch.Tensor, at: int) -> torch.Tensor:
    """A copy of (1, length, dim) with another token at one place; not merely a shifted one, which a norm undoes."""
    other = x.clone()
    other[:, at] = random(x.shape[-1], seed=99)
    return other


def whole(x: torch.Tensor) -> torch.Tensor:
    """Hidden states of whole sequences (rows, length, dim), nothing kept."""
    return TEXT(x, torch.arange(x.shape[1]).expand(len(x), -1))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6))
def test_reading_in_parts_with_a_cache_is_reading_at_once(rows: int, parts: list[int], seed: int) -> None:
    total = PREFIX + sum(parts)
    x = random(rows, total, TINY.text.dim, seed=seed)
    cache = DenseCache.empty(TINY.text, rows, total, x)
    got, at = [], 0
    for part in (PREFIX, *parts):
        positions = torch.arange(at, at + part).expand(rows, -1)
        got.append(TEXT(x[:, at : at + part], positions, cache))
        at += part
    assert torch.allclose(torch.cat(got, dim=1), whole(x), atol=2e-4)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 5), st.integers(0, 10**6))
@torch.inference_mode()
def test_padded_prompts_of_a_batch_go_on_as_each_would_alone(lengths: list[int], more: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(TINY.text.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    image = random(PREFIX - 1, TINY.text.dim, seed=seed)
    runner = Generator(MODEL, TINY.tokenizer.eos_id)
    state = runner.prefill(runner.prefix(image), prompts, more)
    extra = random(len(prompts), more, TINY.text.dim, seed=seed + 1)
    got, positions = [state.hidden], state.positions
    for step in range(more):
        got.append(TEXT(extra[:, step : step + 1], positions.unsqueeze(1), state.cache)[:, 0])
        positions = positions + 1
    bos = TEXT.embed(torch.tensor([TINY.tokenizer.bos_id]))
    for row, ids in enumerate(prompts):
        alone = whole(torch.cat([bos, image, TEXT.embed(torch.tensor(ids)), extra[row]]).unsqueeze(0))[0]
        for step, hidden in enumerate(got):
            assert torch.allclose(hidden[row], alone[PREFIX + len(ids) - 1 + step], atol=2e-4)


@settings(deadline=None, max_examples=30)
@given(st.integers(PREFIX, PREFIX + 11))
def test_a_later_token_never_changes_what_was_before_it(at: int) -> None:
    x = random(1, PREFIX + 12, TINY.text.dim)
    before, after = whole(x), whole(shake(x, at))
    assert torch.equal(before[:, :at], after[:, :at])
    changed = (before[:, at:] - after[:, at:]).abs().amax(-1)
    assert (changed > 1e-4).all()


@settings(deadline=None, max_examples=PREFIX)
@given(st.integers(0, PREFIX - 1))
def test_an_image_token_is_seen_by_all_of_image_and_prompt(at: int) -> None:
    x = random(1, PREFIX + 4, TINY.text.dim)
    assert ((whole(x) - whole(shake(x, at))).abs().amax(-1) > 1e-4).all()


def test_rows_do_not_see_each_other() -> None:
    x = random(3, PREFIX + 5, TINY.text.dim)
    alone = torch.cat([whole(row.unsqueeze(0)) for row in x])
    assert torch.allclose(whole(x), alone, atol=1e-4)
    other = x.clone()
    other[1].neg_()
    assert torch.equal(whole(x)[[0, 2]], whole(other)[[0, 2]])


def test_a_forked_cache_copies_the_prefix_to_every_row() -> None:
    one = DenseCache(random(2, 1, 2, 5, 8), random(2, 1, 2, 5, 8, seed=1))
    forked = one.fork(3, 9)
    assert forked.keys.shape == (2, 3, 2, 9, 8)
    for row in range(3):
        assert torch.equal(forked.keys[:, row, :, :5], one.keys[:, 0])
        assert torch.equal(forked.values[:, row, :, :5], one.values[:, 0])
    forked.keys[:, 0] = 7.0
    assert not (forked.keys[:, 1] == 7.0).any()
    assert not (one.keys == 7.0).any()
    kept = forked.rows(torch.tensor([2, 0]))
    kept.values[:] = 7.0
    assert not (forked.values == 7.0).any()
    assert forked.upto(4).keys.data_ptr() == forked.keys.data_ptr()


def test_a_mask_of_ones_own_is_used_as_given() -> None:
    x = random(1, PREFIX + 3, TINY.text.dim)
    n = x.shape[1]
    at = torch.arange(n)
    mask = (at <= at.unsqueeze(1)) | ((at < PREFIX) & (at.unsqueeze(1) < PREFIX))
    positions = at.unsqueeze(0)
    assert torch.equal(TEXT(x, positions, mask=mask), whole(x))
    causal = at <= at.unsqueeze(1)
    assert not torch.allclose(TEXT(x, positions, mask=causal)[:, 0], whole(x)[:, 0], atol=1e-4)


@given(st.integers(0, 90), st.integers(0, 90), st.integers(0, 5))
def test_rotated_products_depend_on_the_distance_alone(first: int, second: int, shift: int) -> None:
    cosine, sine = rotation_table(TINY.text)
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, (cosine[position].view(1, 1, 1, -1), sine[position].view(1, 1, 1, -1)))

    product = (at(q, first) * at(k, second)).sum()
    assert torch.allclose(product, (at(q, first + shift) * at(k, second + shift)).sum(), atol=1e-4)
    assert torch.allclose(at(q, first).norm(), q.norm(), atol=1e-5)


def test_half_of_each_head_is_rotated_and_the_rest_left_alone() -> None:
    config = TextConfig(dim=128, n_heads=2, max_context=50)
    cosine, sine = rotation_table(config)
    assert cosine.shape == (50, config.rotary_dim // 2) == (50, 16)
    x = random(1, 1, 2, 64)
    turned = rotate(x, (cosine[7].view(1, 1, 1, -1), sine[7].view(1, 1, 1, -1)))
    assert torch.equal(turned[..., 32:], x[..., 32:])
    assert (turned[..., :32] - x[..., :32]).abs().amax() > 0.1
    unturned = rotate(x, (cosine[0].view(1, 1, 1, -1), sine[0].view(1, 1, 1, -1)))
    assert torch.equal(unturned, x)


def test_the_first_pair_turns_by_one_radian_a_position() -> None:
    cosine, sine = rotation_table(TextConfig(dim=128, n_heads=2, max_context=5))
    assert torch.allclose(cosine[:, 0], torch.arange(5.0).cos())
    assert torch.allclose(sine[:, 0], torch.arange(5.0).sin())
    x = torch.zeros(1, 1, 1, 64)
    x[..., 0] = 1.0  # the real part of the first pair; its imaginary part is 16 further on
    turned = rotate(x, (cosine[1].view(1, 1, 1, -1), sine[1].view(1, 1, 1, -1)))
    assert turned[0, 0, 0, 0].item() == pytest.approx(0.5403, abs=1e-4)
    assert turned[0, 0, 0, 16].item() == pytest.approx(0.8415, abs=1e-4)


def test_rotation_keeps_bfloat16() -> None:
    cosine, sine = rotation_table(TINY.text)
    x = random(1, 3, 2, 8).bfloat16()
    at = torch.tensor([0, 5, 9])
    assert rotate(x, (cosine[at].view(1, 3, 1, -1), sine[at].view(1, 3, 1, -1))).dtype == torch.bfloat16


def test_bfloat16_weights_give_close_hidden_states() -> None:
    half = random_model(TINY).bfloat16()
    half.text.cosine, half.text.sine = TEXT.cosine, TEXT.sine
    x = random(2, PREFIX + 6, TINY.text.dim)
    positions = torch.arange(x.shape[1]).expand(2, -1)
    difference = (half.text(x.bfloat16(), positions).float() - whole(x)).abs().mean()
    assert difference < 0.05 * whole(x).abs().mean()


def test_logits_are_of_the_normed_states() -> None:
    hidden = random(2, TINY.text.dim)
    head = TEXT.lm_head
    normed = torch.nn.functional.layer_norm(hidden, (TINY.text.dim,), TEXT.post_ln.weight, TEXT.post_ln.bias)
    assert torch.allclose(TEXT.logits(hidden), normed @ head.weight.T + head.bias, atol=1e-5)


def test_as_many_key_heads_as_query_heads_serve_too() -> None:
    config = dataclasses.replace(TINY, text=dataclasses.replace(TINY.text, n_kv_heads=4))
    text = random_model(config).text
    x = random(2, PREFIX + 4, TINY.text.dim)
    positions = torch.arange(x.shape[1]).expand(2, -1)
    cache = DenseCache.empty(config.text, 2, x.shape[1] + 3, x)
    assert torch.allclose(text(x, positions, cache), text(x, positions), atol=1e-4)


def test_write_kv_leaves_the_prefix_of_a_whole_forward() -> None:
    x = random(2, PREFIX, TINY.text.dim)
    short, full = (DenseCache.empty(TINY.text, 2, PREFIX, x) for _ in range(2))
    TEXT.write_kv(x, short)
    TEXT(x, torch.arange(PREFIX).expand(2, -1), full)
    assert torch.allclose(short.keys, full.keys, atol=1e-5)
    assert torch.allclose(short.values, full.values, atol=1e-5)
