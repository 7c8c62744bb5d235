"""Initial weights for the text decoder of the model "nano": the decoder copies the detections from the image tokens.

A decoder with random weights would first have to learn this copying. Attention heads of three blocks copy as follows:

    block  head  query at                attends to                             copies
    0      0     end of the prompt       the previous token                     class name
    1      0     width and height        the next detection in the list         x
    1      1     x                       the detection with this x              y
    1      2     y                       the detection with this y              width and height
    2      0     end of the prompt       the first detection of the class       x

The model must have a width of 192, 3 heads, and region heads without hidden layers.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block
from saccade.engine.models.nano.detector_tower import OCTAVES, DetectorTower

_CODE = 2 * OCTAVES  # dimensions of one value's cosines and sines
# Where the residual holds what. Image tokens: own cx, cy, log w, log h; cx, cy, w, h of the one before; the class.
_X, _Y, _LOG_W, _LOG_H, _BEFORE_X, _BEFORE_Y, _BEFORE_W, _BEFORE_H, _CLASS = (i * _CODE for i in range(9))
# In prompts and answers, where no image token has what is looked up by it, or they would find themselves: the word of
# the class, what was stated last, and the coordinate to be stated. Sizes to be stated are at _LOG_W and _LOG_H.
_START = _CLASS - 1  # of the start of the sequence
_WORD, _STATED_WIDTH, _STATED_HEIGHT, _STATED_PLACE, _SAY = _BEFORE_W, _X, _Y, _BEFORE_Y, _BEFORE_X


@torch.no_grad()
def wire(model: Moondream, words: torch.Tensor) -> None:
    """Initialize the text decoder of a new model, so that it copies the detector's boxes to its output.

    Args:
        model: a model whose vision encoder is a detector. The weights of the detector do not change.
        words: (classes,) int64 token IDs of the class names.

    Raises:
        ValueError: if the text decoder has unsupported dimensions, or if there are more than 31 classes.
    """
    tower, text, region = model.vision, model.text, model.region
    assert isinstance(tower, DetectorTower)
    width, head = text.config.dim, text.config.head_dim
    if width < _CLASS + 32 or head != 64 or len(text.blocks) < 3 or len(words) > 31:
        raise ValueError(
            "unsupported text decoder: the initial weights need width 192, head width 64, 3 layers, up to 31 classes"
        )

    for parameter in (text.wte, tower.pos_emb, tower.nothing, tower.label.weight):
        nn.init.normal_(parameter, std=0.02)
    for linear in (tower.feature, tower.evidence, tower.coarse):
        linear.weight.mul_(0.3)
        linear.bias.zero_()
    classes = torch.arange(len(words))
    tower.label.weight[classes, _CLASS + classes] = 3.0
    text.wte[words, _WORD + classes] = 3.0
    # Tokens: values one after another, as `tokens` puts them together.
    tower.box.weight.copy_(torch.eye(4 * _CODE, width).t())
    tower.box.bias.zero_()
    order = torch.cat([torch.arange(start, start + _CODE) for start in (_BEFORE_X, _BEFORE_Y, _BEFORE_W, _BEFORE_H)])
    tower.before.weight.zero_()
    tower.before.weight[order, torch.arange(4 * _CODE)] = 1.0
    tower.begins.zero_()
    tower.begins[_CLASS + 31] = 3.0

    _embed_answers(model)
    blocks = [block for block in text.blocks if isinstance(block, Block)]
    for block in blocks:
        assert isinstance(block.mlp, Mlp)
        for linear in (block.attn.proj, block.mlp.fc2):
            linear.weight.mul_(0.3)
            linear.bias.zero_()
    _look_one_back(blocks[0], head, _WORD + classes)
    for number, (asked, held, found, stated) in enumerate(
        (
            ([_STATED_WIDTH, _STATED_HEIGHT], [_BEFORE_W, _BEFORE_H], [_X], [_SAY]),
            ([_STATED_PLACE], [_X], [_Y], [_SAY]),
            ([_STATED_PLACE], [_Y], [_LOG_W, _LOG_H], [_LOG_W, _LOG_H]),
        )
    ):
        rows = 8 if len(asked) == 2 else OCTAVES
        pick = [_waves(start, rows) for start in asked], [_waves(start, rows) for start in held]
        _look_up(blocks[1], number, torch.cat(pick[0]), torch.cat(pick[1]), 4.0)
        _carry(blocks[1], number, torch.cat([_waves(s) for s in found]), torch.cat([_waves(s) for s in stated]), 2.0)
    _look_up(blocks[2], 0, _WORD + classes, _CLASS + classes, 2.5)
    # That it is the first of its class, reported by the slowest of the rotated dimensions, which hardly turn.
    attn, dim = blocks[2].attn, text.config.dim
    slow = torch.arange(12, 16)
    attn.qkv.bias[slow] = 4.0
    attn.qkv.weight[dim + slow, _CLASS + 31] = 1.5
    # Who does not ask sees the start of the sequence, where there is nothing.
    attn.qkv.weight[dim + slow, _START] = 0.8
    text.wte[model.config.tokenizer.bos_id, _START] = 3.0
    _carry(blocks[2], 0, _waves(_X), _waves(_SAY), 2.0)
    _read_out(region.coord_decoder, [_SAY], 1024.0)
    _read_out(region.size_decoder, [_LOG_W, _LOG_H], 1023.0)


def _embed_answers(model: Moondream) -> None:
    """Initialize the coordinate and size encoders, so that they output the Fourier features of their input."""
    region = model.region
    half = region.config.coord_feat_dim // 2
    nn.init.normal_(region.coord_features, std=6.0)
    nn.init.normal_(region.size_features, std=4.0)
    turns = 2.0 ** torch.arange(-1, OCTAVES - 1)
    region.coord_features[0, :OCTAVES] = turns
    region.coord_encoder.weight.mul_(0.05)
    region.coord_encoder.bias.zero_()
    at = torch.arange(OCTAVES)
    region.coord_encoder.weight[_STATED_PLACE + at, at] = 1.0
    region.coord_encoder.weight[_STATED_PLACE + OCTAVES + at, half + at] = 1.0
    half = region.config.size_feat_dim // 2
    region.size_features[:, : 2 * OCTAVES] = 0.0
    region.size_features[0, :OCTAVES] = turns
    region.size_features[1, OCTAVES : 2 * OCTAVES] = turns
    region.size_encoder.weight.mul_(0.05)
    region.size_encoder.bias.zero_()
    for number, place in enumerate((_STATED_WIDTH, _STATED_HEIGHT)):
        region.size_encoder.weight[place + at, number * OCTAVES + at] = 1.0
        region.size_encoder.weight[place + OCTAVES + at, half + number * OCTAVES + at] = 1.0


def _waves(start: int, octaves: int = OCTAVES) -> torch.Tensor:
    """Return the channels that hold the Fourier features (cosines and sines) of one number."""
    at = torch.arange(octaves)
    return torch.cat([start + at, start + OCTAVES + at])


def _look_one_back(block: Block, head: int, places: torch.Tensor) -> None:
    """Initialize attention head 0 of a block, so that each token copies the channels `places` of the previous token."""
    qkv, half, dim = block.attn.qkv, head // 4, block.attn.config.dim
    angles = 10000.0 ** -(torch.arange(half) / half)  # of one position, as `rotation_table` has them
    for start in (0, dim):
        qkv.weight[start : start + head] = 0.0
        qkv.bias[start : start + head] = 0.0
    qkv.bias[dim : dim + half] = 9.0
    # A query at position p turns by p: to meet a key at p - 1 it is turned back by one.
    qkv.bias[:half], qkv.bias[half : 2 * half] = 9.0 * angles.cos(), -9.0 * angles.sin()
    _carry(block, 0, places, places, 1.0)


def _look_up(block: Block, number: int, asked: torch.Tensor, held: torch.Tensor, gain: float) -> None:
    """Initialize an attention head whose queries read the channels `asked`, and whose keys read the channels `held`."""
    qkv, config = block.attn.qkv, block.attn.config
    start, free = number * config.head_dim, config.rotary_dim
    for first, places in ((start, asked), (config.dim + start, held)):
        qkv.weight[first : first + config.head_dim] = 0.0
        qkv.bias[first : first + config.head_dim] = 0.0
        qkv.weight[first + free + torch.arange(len(places)), places] = gain


def _carry(block: Block, number: int, found: torch.Tensor, stated: torch.Tensor, gain: float) -> None:
    """Initialize an attention head, so that it adds the channels `found`, times `gain`, to the channels `stated`."""
    qkv, proj, config = block.attn.qkv, block.attn.proj, block.attn.config
    start = number * config.head_dim
    first = 2 * config.dim + start
    qkv.weight[first : first + config.head_dim] = 0.0
    qkv.bias[first : first + config.head_dim] = 0.0
    at = torch.arange(len(found))
    qkv.weight[first + at, found] = 1.0
    proj.weight[:, start : start + config.head_dim] = 0.0
    proj.weight[stated, start + at] = gain


def _read_out(decoder: nn.Module, places: list[int], steps: float) -> None:
    """Initialize a decoder, so that it outputs the numbers whose Fourier features begin at the channels `places`."""
    assert isinstance(decoder, nn.Linear)
    bins = decoder.out_features // len(places)
    turns = (torch.arange(bins) / steps).unsqueeze(1) * 2.0 ** torch.arange(OCTAVES) * math.pi
    weights = torch.cat([turns.cos(), turns.sin()], dim=1)
    decoder.weight.mul_(0.1)
    decoder.bias.zero_()
    for number, place in enumerate(places):
        decoder.weight[number * bins : (number + 1) * bins, _waves(place)] = weights
