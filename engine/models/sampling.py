"""Sampling: what a step takes from hidden states, and how what was taken, or guessed, is fed again.

| what | where |
|---|---|
| coordinates and sizes | `Runner.sample_regions`; on CUDA `kernels.region_sampling` |
| tokens | the likeliest, by `take_tokens`; where a row wants more, `sample`: at a temperature, under a grammar |
| whether one more object begins | on the host, by `ObjectsOutput.begins` (`tasks.output_state`), from two logits |

The noise is counter-based, not drawn from a generator: it is a hash of a request's seed, the step and the token, so an
answer depends neither on what shares its batch nor on how early it was launched. Knows no steps, slots or requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from saccade.engine.models.protocol import Model, Phase, RegionHeads, TextDecoder

SAMPLED = 3
"""Numbers that a step yields for each row, see `output_state.OutputState.commit`."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the constants of splitmix64 (Steele, Lea & Flood 2014), as signed numbers
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def suppress(logits: torch.Tensor, phases: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits (rows, vocab), in place with those of `ids` (n,) at -inf where a row's phase is LATER_TOKEN."""
    later = (phases == Phase.LATER_TOKEN).unsqueeze(1)
    return logits.index_copy_(1, ids, logits.index_select(1, ids).masked_fill(later, -torch.inf))


def take_tokens(
    text: TextDecoder,
    token: torch.Tensor,
    phases: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Make a token the sample of each row of text, and its embedding what the next step begins with.

    Args:
        text: the decoder.
        token: (rows,) ids; of no meaning where a row's phase is none of text.
        phases: (rows,).
        batch_slots: (rows,) rows of `state`.
        sampled: (rows, 3) float32.
        state: (batch slots, dim).
    """
    wanted, slots = (phases >= Phase.TOKEN).unsqueeze(1), batch_slots.long()
    sampled.copy_(torch.where(wanted, token.unsqueeze(1).float(), sampled))
    state[slots] = torch.where(wanted, text.embed(token), state[slots])


def take_allowed(
    text: TextDecoder,
    rows: torch.Tensor,
    masks: torch.Tensor,
    which: torch.Tensor,
    logits: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """As `take_tokens` the likeliest token that is allowed, for some rows of text.

    Args:
        text: the decoder.
        rows: (n,) int64 rows of what follows; one that is there twice has the same mask.
        masks: (any, vocab) bool, True where a token is allowed.
        which: (n,) int64 rows of `masks`.
        logits: (any, vocab) float32.
        batch_slots: (any,) rows of `state`.
        sampled: (any, 3) float32, of which the first number is written.
        state: (batch slots, dim).
    """
    allowed = torch.where(masks.index_select(0, which), logits.index_select(0, rows), -torch.inf)
    token = allowed.argmax(-1)
    sampled.select(1, 0).index_copy_(0, rows, token.float())
    state.index_copy_(0, batch_slots.index_select(0, rows).long(), text.embed(token))


def take_coordinates(
    region: RegionHeads,
    hidden: torch.Tensor,
    wanted: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Where a row of text has sampled the coordinate token, sample its coordinate, which the next step begins with.

    Args:
        region: the model's region heads.
        hidden: (rows, dim) hidden states that the tokens were sampled from.
        wanted: (rows,) bool.
        batch_slots: (rows,) rows of `state`.
        sampled: (rows, 3) float32; the coordinate becomes the second number.
        state: (batch slots, dim).
    """
    coordinate, slots = region.coord(hidden), batch_slots.long()
    sampled[:, 1] = torch.where(wanted, coordinate.squeeze(1), sampled[:, 1])
    state[slots] = torch.where(wanted.unsqueeze(1), region.encode_coord(coordinate), state[slots])


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


# ---- what is fed again


def embed_fed(model: Model, kinds: torch.Tensor, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Embeddings of values that the host feeds: what a sequence has sampled, or a guess of that.

    Args:
        model: the model.
        kinds: (…) int, `Phase.Y` for a coordinate, `Phase.SIZE` for a size, `Phase.TOKEN` for a token, 0 for none.
        values: (…, 2) float32: (coordinate, any), (width, height), (token id, any).
        others: (…, dim) embeddings where the kind is 0.

    Returns:
        (…, dim).
    """
    kind = kinds.unsqueeze(-1)
    x = torch.where(kind == Phase.Y, model.region.encode_coord(values[..., :1]), others)
    x = torch.where(kind == Phase.SIZE, model.region.encode_size(values), x)
    ids = torch.where(kinds == Phase.TOKEN, values[..., 0], 0.0)
    return torch.where(kind == Phase.TOKEN, model.text.embed(ids.to(torch.int64)), x)


def seen_values(objects: torch.Tensor, which: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """What is fed of objects that a vision encoder has seen, see `embed_fed`.

    Args:
        objects: (images, n, 5) float32, see `DraftingEncoder.features_and_drafts`.
        which: (tokens, 4) int32: the image; the class, -1 for none of this; which of its objects; 0 for x, 1 for y, 2
            for width and height.
        others: (tokens, 2) float32, what is fed where there is no class.

    Returns:
        (tokens, 2); zeros where there are fewer objects.
    """
    image, label, number, part = which.unsqueeze(-1).unbind(1)
    of = F.embedding(image.squeeze(1), objects.flatten(1)).view(-1, *objects.shape[1:])
    same = of[..., 0] == label
    wanted = same & (same.cumsum(1) == number + 1)  # one at most
    x, y, width, height = torch.where(wanted.unsqueeze(-1), of[..., 1:], 0.0).sum(1).split(1, dim=1)
    first = torch.where(part == 0, x, torch.where(part == 1, y, width))
    values = torch.cat([first, torch.where(part == 2, height, 0.0)], dim=1)
    return torch.where(label == -1, others, values)


def put_values(region: RegionHeads, embeddings: torch.Tensor, values: Mapping[int, tuple[float, ...]]) -> None:
    """Put coordinates and sizes in place of some embeddings (tokens, dim); does not wait.

    Args:
        region: the model's region heads.
        embeddings: as above.
        values: one number is a coordinate, two are a size, in 0..1; by their rows of `embeddings`.
    """
    device = embeddings.device
    for length, encode in ((1, region.encode_coord), (2, region.encode_size)):
        at = [place for place, numbers in values.items() if len(numbers) == length]
        if at:
            pinned = device.type == "cuda"
            rows = torch.tensor(at, pin_memory=pinned).to(device, non_blocking=True)
            numbers = torch.tensor([values[place] for place in at], pin_memory=pinned).to(device, non_blocking=True)
            embeddings.index_copy_(0, rows, encode(numbers).to(embeddings.dtype))
