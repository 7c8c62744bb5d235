from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine.models.moondream.config import RegionConfig
from saccade.engine.models.moondream.region import RegionHeads, fourier_features, size_bin, size_value


def test_every_size_bin_survives_the_way_to_a_value_and_back() -> None:
    bins = torch.arange(1024)
    assert torch.equal(size_bin(size_value(bins, 1024), 1024), bins)


def test_sizes_go_from_a_thousandth_to_the_whole_image() -> None:
    assert size_value(torch.tensor([0, 1023]), 1024).tolist() == [2.0**-10, 1.0]
    assert size_value(torch.tensor([512]), 1024).dtype == torch.float32


@given(st.lists(st.floats(-1.0, 5.0, width=32), min_size=1, max_size=20), st.integers(2, 2048))
def test_size_bins_are_in_range_and_never_fall_as_sizes_grow(sizes: list[float], n_bins: int) -> None:
    bins = size_bin(torch.tensor(sorted(sizes), dtype=torch.float32), n_bins).tolist()
    assert bins == sorted(bins)
    assert bins[0] >= 0
    assert bins[-1] < n_bins


@given(st.floats(2.0**-10, 1.0, width=32))
def test_a_size_is_off_by_half_a_bin_at_most(size: float) -> None:
    back = size_value(size_bin(torch.tensor([size]), 1024), 1024).item()
    assert abs(torch.tensor(back / size).log2().item()) <= 0.5 * 10 / 1023 + 1e-5


def test_fourier_features_are_cosines_then_sines() -> None:
    out = fourier_features(torch.tensor([[0.25]]), torch.tensor([[1.0, 2.0]]))
    assert torch.allclose(out, torch.tensor([[0.0, -1.0, 1.0, 0.0]]), atol=1e-6)


def test_fourier_features_add_the_angles_of_all_inputs() -> None:
    one = fourier_features(torch.tensor([[0.1, 0.3]]), torch.tensor([[2.0], [5.0]]))
    assert torch.allclose(one, fourier_features(torch.tensor([[1.7]]), torch.tensor([[1.0]])), atol=1e-5)


def test_fourier_features_are_float32_under_bfloat16_weights() -> None:
    frequencies = torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).mul(10).bfloat16()
    value = torch.arange(1024).unsqueeze(-1) / 1024
    out = fourier_features(value, frequencies)
    assert out.dtype == torch.float32
    angles = 2 * torch.pi * value.double() * frequencies.double()
    assert (out - torch.cat([angles.cos(), angles.sin()], dim=-1)).abs().max() < 1e-4


def test_neighbouring_bins_differ_under_bfloat16_weights() -> None:
    torch.manual_seed(0)
    heads = RegionHeads(RegionConfig(dim=32, coord_feat_dim=64, size_feat_dim=64, inner_dim=8)).requires_grad_(False)
    torch.nn.init.normal_(heads.coord_features, std=40.0)
    heads = heads.bfloat16()
    out = heads.encode_coord(torch.arange(1024).unsqueeze(-1) / 1024)
    assert out.dtype == torch.bfloat16
    assert (out[1:] - out[:-1]).abs().amax(-1).min() > 0  # 1023/1024 and 1022/1024 are one number in bfloat16


@pytest.mark.parametrize("inner", [0, 8])
def test_the_size_head_gives_width_then_height(inner: int) -> None:
    torch.manual_seed(0)
    config = RegionConfig(dim=8, coord_feat_dim=8, size_feat_dim=8, size_out_dim=20, coord_out_dim=12, inner_dim=inner)
    heads = RegionHeads(config)
    hidden = torch.randn(3, 5, 8)
    assert heads.decode_coord(hidden).shape == (3, 5, 12)
    flat = heads.size_decoder(hidden)
    sizes = heads.decode_size(hidden)
    assert torch.equal(sizes[..., 0, :], flat[..., :10])
    assert torch.equal(sizes[..., 1, :], flat[..., 10:])
