from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.engine.models.moondream.csp_stem import Conv, CspStem
from saccade.engine.training.import_stem import add_norms, convert, fold_norms, load_start
from tests.support.engine import one_thread, write_graph


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


def normed() -> tuple[CspStem, CspStem, torch.Tensor]:
    """A stem, its copy with norms, and the crops that the norms were made on."""
    torch.manual_seed(0)
    plain = CspStem(16).eval().requires_grad_(False)
    for module in plain.modules():
        if isinstance(module, Conv):
            torch.nn.init.kaiming_normal_(module.conv.weight)
    stem, crops = copy.deepcopy(plain), torch.randn(4, 3, 64, 64)
    add_norms(stem, crops)
    return plain, stem, crops


def shaken() -> CspStem:
    """A stem whose norms have seen something."""
    _, stem, _ = normed()
    for module in stem.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.uniform_(module.bias, -0.3, 0.3)
            module.momentum = 0.5
    stem.train()
    with torch.no_grad():
        for _ in range(2):
            stem(torch.randn(4, 3, 64, 64))
    return stem.eval()


def test_new_norms_change_nothing() -> None:
    plain, stem, crops = normed()
    assert all(isinstance(module.norm, torch.nn.BatchNorm2d) for module in stem.modules() if isinstance(module, Conv))
    assert not any(module.training for module in stem.modules())
    other = torch.randn(2, 3, 64, 96)
    assert torch.allclose(stem(other), plain(other), atol=1e-4)
    assert torch.allclose(
        stem.train()(crops), plain(crops), atol=1e-4
    )  # on what they were made on, even while training


def test_folded_norms_give_what_the_norms_gave() -> None:
    stem, images = shaken(), torch.randn(2, 3, 64, 64)
    folded = fold_norms(stem)
    with torch.no_grad():
        assert torch.allclose(folded(images), stem(images), atol=1e-4)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in stem.modules())  # the original is as it was
    assert set(folded.state_dict()) == set(CspStem(16).state_dict())


def test_a_published_graph_becomes_the_stem_for_our_pixels(tmp_path: Path) -> None:
    theirs = write_graph(tmp_path)
    ours = CspStem(4)
    load_start(ours, convert(tmp_path / "graph.json"))
    pixels = torch.randint(0, 256, (2, 3, 64, 64)).float()
    mean, spread = torch.tensor([103.53, 116.28, 123.675]), torch.tensor([57.375, 57.12, 58.395])
    blue_first = (pixels.flip(1) - mean.view(3, 1, 1)) / spread.view(3, 1, 1)
    with torch.no_grad():
        wanted, got = theirs.first(blue_first), ours.first(pixels / 127.5 - 1)
        assert torch.allclose(got[:, :, 1:, 1:], wanted[:, :, 1:, 1:], atol=2e-2)  # what is padded differs
        for block, other in zip(ours.blocks, theirs.blocks, strict=True):
            wanted = other(got)
            got = block(got)
            assert torch.allclose(got, wanted, atol=2e-3)


def test_another_graph_is_refused(tmp_path: Path) -> None:
    write_graph(tmp_path, lambda nodes: nodes.__delitem__(slice(-2, None)))
    with pytest.raises(ValueError, match="no convolution 'PartitionedCall/convolution_24'"):
        convert(tmp_path / "graph.json")

    def swap(nodes: list[dict[str, Any]]) -> None:
        nodes[4]["input"][1] = "kernel_3"

    write_graph(tmp_path, swap)
    with pytest.raises(ValueError, match=r"convolution_2' is \[16, 16, 3, 3\]"):
        convert(tmp_path / "graph.json")


def test_weights_of_another_stem_are_refused(tmp_path: Path) -> None:
    write_graph(tmp_path)
    weights = convert(tmp_path / "graph.json")
    with pytest.raises(ValueError, match=r"first\.conv\.bias"):
        load_start(CspStem(4), {name: value for name, value in weights.items() if name != "first.conv.bias"})
