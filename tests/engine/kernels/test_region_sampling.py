"""Sampling of coordinates and sizes against plain formulas. Runs on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.protocol import Phase
from tests.support.engine.kernels import DEVICE, far, needs_triton

pytestmark = needs_triton
DIM, BINS, COORD, SIZE = 96, 64, 32, 64
PHASES = [Phase.X_OR_EOS, Phase.Y, Phase.SIZE, Phase.TOKEN, Phase.X_OR_EOS]


def fourier(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat([(2 * math.pi * angles).cos(), (2 * math.pi * angles).sin()], dim=-1)


@torch.inference_mode()
def test_each_row_samples_what_its_phase_says() -> None:
    from saccade.engine.kernels.region_sampling import encode, sample

    torch.manual_seed(1)
    rows, phases = len(PHASES), torch.tensor([int(phase) for phase in PHASES], dtype=torch.int32, device=DEVICE)
    norm = nn.LayerNorm(DIM, device=DEVICE)
    norm.weight.normal_()
    norm.bias.normal_()
    hidden, weight, bias = (torch.randn(shape, device=DEVICE) for shape in ((rows, DIM), (2, DIM), 2))
    coords, sizes = torch.randn(2, rows, BINS, device=DEVICE), torch.randn(1, rows, 2 * BINS, device=DEVICE)
    coord_bias, size_bias = torch.randn(BINS, device=DEVICE), torch.randn(2 * BINS, device=DEVICE)
    of_coord, of_size = torch.randn(1, COORD // 2, device=DEVICE), torch.randn(2, SIZE // 2, device=DEVICE)
    values = torch.rand(BINS, device=DEVICE)
    sampled, features = torch.zeros(rows, 3, device=DEVICE), torch.zeros(rows, SIZE, device=DEVICE)
    scores = (coords, coord_bias), (sizes, size_bias)
    sample(hidden, phases, norm, (weight, bias), *scores, of_coord, of_size, values, sampled, features)

    coord = (coords.sum(0) + coord_bias).argmax(-1, keepdim=True) / BINS
    sides = values[(sizes[0] + size_bias).view(rows, 2, BINS).argmax(-1)]
    begins = F.linear(norm(hidden), weight, bias)
    margin = begins[:, :1] - begins[:, 1:]
    wanted = torch.zeros(rows, 3, device=DEVICE)
    of_rows = torch.zeros(rows, SIZE, device=DEVICE)
    for row, phase in enumerate(PHASES):
        if phase == Phase.SIZE:
            wanted[row, :2], of_rows[row] = sides[row], fourier(sides[row] @ of_size)
        elif phase != Phase.TOKEN:
            wanted[row], of_rows[row, :COORD] = coord[row], fourier(coord[row] @ of_coord)
            if phase == Phase.X_OR_EOS:
                wanted[row, 0] = margin[row, 0]
    assert far(sampled, wanted) < 1e-5
    assert far(features, of_rows) < 1e-4

    encoders = nn.Linear(COORD, DIM, device=DEVICE), nn.Linear(SIZE, DIM, device=DEVICE)
    slots, state = torch.tensor([4, 2, 0, 1, 3], dtype=torch.int32, device=DEVICE), torch.zeros(6, DIM, device=DEVICE)
    encode(features, phases, slots, *encoders, state)
    expected = torch.zeros(6, DIM, device=DEVICE)
    for row, phase in enumerate(PHASES):
        if phase != Phase.TOKEN:
            is_size = phase == Phase.SIZE
            expected[slots[row]] = encoders[is_size](features[row] if is_size else features[row, :COORD])
    assert far(state, expected) < 1e-3
