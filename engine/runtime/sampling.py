"""Sampling the next token of many rows at once, on any device, without synchronizing.

The noise is counter-based, not drawn from a generator: it is a hash of a request's seed, the step and the token, so an
answer depends neither on what shares its batch nor on how early it was launched. Knows tensors only.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the constants of splitmix64 (Steele, Lea & Flood 2014), as signed numbers
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seed: torch.Tensor,
    step: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token for each row: the most likely one at temperature 0, else by Gumbel-max (exact, one argmax).

    Args:
        logits: (rows, vocab) float32.
        temperature: (rows,) float32, 0 or more. None where it is 0 in all rows, which saves the noise.
        top_p: (rows,) float32 in (0, 1]: sample from the fewest most likely tokens that reach it together. None where
            no row uses it, which saves a sort.
        seed: (rows,) int64, the request's own.
        step: (rows,) int64, a number that the request has not used before.
        mask: (rows, vocab) bool, True where a token is allowed; at least one in each row.

    Returns:
        (rows,) int64.
    """
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if temperature is None:
        return logits.argmax(-1)
    warm = temperature > 0
    scores = logits.double() / torch.where(warm, temperature, 1.0).double().unsqueeze(1)
    if top_p is not None:
        scores = keep_top_p(scores, top_p)
    drawn = (scores + gumbel(seed, step, logits.shape[1])).argmax(-1)
    return torch.where(warm, drawn, logits.argmax(-1))


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Scores (rows, vocab) with all but the fewest most likely tokens whose probabilities reach top_p (rows,) at -inf.

    Of equally likely tokens those with the smaller numbers are kept.
    """
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.softmax(-1).cumsum(-1)[:, :-1], (1, 0))  # of all tokens that are likelier
    wanted = top_p.double().unsqueeze(1)
    drop = (before >= wanted) & (wanted < 1)
    drop[:, 0] = False
    return torch.empty_like(scores).scatter(1, index, ordered.masked_fill(drop, -torch.inf))


def gumbel(seed: torch.Tensor, step: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise (rows, vocab) float64, a function of seed (rows,), step (rows,) and token alone."""
    key = _mix(_mix(seed + _GOLDEN) + step * _GOLDEN).unsqueeze(1)
    bits = _mix(key + torch.arange(1, vocab + 1, device=seed.device) * _GOLDEN)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Splitmix64's finaliser: each bit in changes each bit out with probability 1/2. int64 wraps around."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)
