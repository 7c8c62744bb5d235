"""Drawn tokens against the exact distribution; the same draw whatever shares the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.models.runner import _GOLDEN, _mix, gumbel, keep_top_p, sample

# Sums of squared deviations, by degrees of freedom, that chance exceeds once in a thousand tables.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def rows(value: float, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype)


def draw(logits: list[float], n: int, temperature: float, top_p: float, mask: list[bool] | None = None) -> list[int]:
    """How often each token comes in n draws: half of them of one seed at many steps, half of many seeds."""
    seed, step = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    seed[n // 2 :], step[n // 2 :] = step[n // 2 :], 3
    drawn = sample(
        torch.tensor(logits).expand(n, -1),
        rows(temperature, n),
        rows(top_p, n),
        seed,
        step,
        None if mask is None else torch.tensor(mask).expand(n, -1),
    )
    return torch.bincount(drawn, minlength=len(logits)).tolist()


def exact(logits: list[float], temperature: float, top_p: float, mask: list[bool] | None = None) -> list[float]:
    """Probabilities, by the book and one by one."""
    allowed = [i for i in range(len(logits)) if mask is None or mask[i]]
    weights = {i: math.exp((logits[i] - max(logits)) / temperature) for i in allowed}
    total = sum(weights.values())
    kept, reached = set(), 0.0
    for i in sorted(allowed, key=lambda i: (-logits[i], i)):
        if kept and reached >= top_p:
            break
        kept.add(i)
        reached += weights[i] / total
    norm = sum(weights[i] for i in kept)
    return [weights[i] / norm if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.35])
@pytest.mark.parametrize("mask", [None, [True, False, True, True, False, True, True, True]])
def test_draws_follow_the_distribution(temperature: float, top_p: float, mask: list[bool] | None) -> None:
    logits, n = [1.0, 2.5, -1.0, 0.3, 2.4, 0.0, 1.7, -3.0], 20_000
    wanted = [p * n for p in exact(logits, temperature, top_p, mask)]
    counts = draw(logits, n, temperature, top_p, mask)
    assert [c for c, w in zip(counts, wanted, strict=True) if not w] == [0] * wanted.count(0.0)
    some = [(c, w) for c, w in zip(counts, wanted, strict=True) if w > 5]
    rest = sum(w for w in wanted if 0 < w <= 5)
    if rest:
        some.append((n - sum(c for c, _ in some), rest))
    if len(some) > 1:
        assert sum((c - w) ** 2 / w for c, w in some) < CHI_SQUARE[len(some) - 1]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=12),
    top_p=st.sampled_from([1e-6, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0]),
)
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(logits: list[float], top_p: float) -> None:
    kept = keep_top_p(torch.tensor([logits], dtype=torch.float64), torch.tensor([top_p])).isfinite()[0].tolist()
    p = torch.tensor(logits, dtype=torch.float64).softmax(-1).tolist()
    inside, outside = [p[i] for i in range(len(p)) if kept[i]], [p[i] for i in range(len(p)) if not kept[i]]
    assert inside
    assert min(inside) >= max(outside, default=0.0)
    limit = float(torch.tensor(top_p))  # as float32 has it
    assert sum(inside) >= limit - 1e-9
    assert len(inside) == 1 or sum(inside) - min(inside) < limit + 1e-9


def test_top_p_is_exact_where_probabilities_are() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, count in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.9, 4), (1.0, 4)):
        assert int(keep_top_p(scores, torch.tensor([top_p])).isfinite().sum()) == count


def test_without_temperature_it_is_the_likeliest_that_is_allowed() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0], [0.0, 9.0, 8.0]])
    mask = torch.tensor([[True, True, True], [True, True, True], [True, False, True]])
    seed, step = torch.arange(3), torch.arange(3)
    assert sample(logits, rows(0.0, 3), rows(0.1, 3), seed, step, mask).tolist() == [1, 0, 2]
    assert sample(logits, rows(0.0, 3), None, seed, step).tolist() == [1, 0, 1]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 9), at=st.integers(0, 8), seed=st.integers(-(2**63), 2**63 - 1))
def test_a_draw_is_the_same_alone_and_in_any_company(count: int, at: int, seed: int) -> None:
    at %= count
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, 50, generator=generator)
    temperature, top_p = torch.rand(count, generator=generator) * 2, torch.rand(count, generator=generator) + 0.01
    seeds, steps = torch.arange(count), torch.arange(count) * 7
    seeds[at] = seed
    mask = torch.rand(count, 50, generator=generator) < 0.5
    mask[:, 0] = True
    every = (logits, temperature, top_p, seeds, steps, mask)
    assert sample(*(one[at : at + 1] for one in every)).tolist() == [sample(*every)[at].item()]


def test_noise_of_neighbouring_seeds_and_steps_is_independent() -> None:
    seed, step = torch.meshgrid(torch.arange(30), torch.arange(30), indexing="ij")
    noise = gumbel(seed.flatten(), step.flatten(), 40)
    assert noise.isfinite().all()
    assert noise.unique().numel() == noise.numel()
    grid = noise.unflatten(0, (30, 30))
    for dim in range(3):
        a, b = grid.narrow(dim, 0, grid.shape[dim] - 1), grid.narrow(dim, 1, grid.shape[dim] - 1)
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.03
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)  # Euler's constant
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.06)


def test_the_hash_is_splitmix64() -> None:
    """Its published first numbers: the same on every device and in every release of torch."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = torch.tensor(1234567) + torch.arange(1, 4) * _GOLDEN
    assert [value % (1 << 64) for value in _mix(states).tolist()] == wanted
