"""Weights in FP8: how exact they are, and that rounding them is what a loaded model computes with. On the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from saccade.engine import Engine
from saccade.engine.errors import EngineError, Fallbacks
from saccade.engine.golden.random_model import random_engine
from saccade.engine.models import quantization
from saccade.engine.models.moondream.text import Block
from saccade.engine.models.quantization import LARGEST, dequantize, fp8_linear, quantize, round_to_fp8
from tests.support.engine import SCREEN, TINY, random_model, square


def test_weights_are_within_a_sixteenth_and_keep_their_largest() -> None:
    weight = torch.randn(64, 512) * torch.logspace(-4, 3, 64).unsqueeze(1)
    packed, scale = quantize(weight)
    back = dequantize(packed, scale, torch.float32)
    error = (back - weight).abs()
    # Three bits of fraction are a sixteenth; below the smallest normal number, 2⁻⁶, steps are 2⁻⁹ of the scale.
    assert (error <= torch.maximum(weight.abs() / 16, scale.unsqueeze(1) * 2**-10) * 1.0001).all()
    torch.testing.assert_close(back.abs().amax(1), weight.abs().amax(1))
    assert float(packed.float().abs().max()) == LARGEST


def test_outputs_of_nothing_but_zeros_stay_so() -> None:
    packed, scale = quantize(torch.zeros(3, 16))
    assert torch.equal(dequantize(packed, scale, torch.float32), torch.zeros(3, 16))


def test_rounding_twice_changes_nothing_that_matters() -> None:
    weight = torch.randn(32, 256, dtype=torch.bfloat16)
    once = dequantize(*quantize(weight), torch.bfloat16)
    again = dequantize(*quantize(once), torch.bfloat16)
    assert float(((again - once).abs() / once.abs().clamp(min=1e-6)).max()) < 2**-7  # bfloat16's own step


def test_the_blocks_of_a_model_are_rounded_and_the_rest_is_not() -> None:
    model, before = random_model(TINY), random_model(TINY)
    round_to_fp8(model)
    assert model.fp8
    changed = {
        name.rsplit(".", 1)[0]
        for (name, one), (_, other) in zip(model.named_parameters(), before.named_parameters(), strict=True)
        if not torch.equal(one, other)
    }
    wanted = {name for name, module in model.named_modules() if ".blocks." in name and hasattr(module, "weight")}
    assert changed == {name for name in wanted if ".ln" not in name}
    # What comes out of attention and MLP is added up, so kernels keep it with common scales.
    for block in model.text.blocks:
        assert isinstance(block, Block)
        out = torch.cat([block.attn.proj.weight, block.mlp.fc2.weight], dim=1)
        torch.testing.assert_close(dequantize(*quantize(out), out.dtype), out)


def refuses(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")


def forgets_a_scale(x: torch.Tensor, scales: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return fp8_linear(x, torch.ones_like(scales), *others)


@pytest.mark.parametrize(
    ("product", "capability", "sizes", "wanted"),
    [
        (fp8_linear, (9, 0), (730, 2048, 8192), True),
        (fp8_linear, (12, 0), (730, 2048, 8192), True),
        (fp8_linear, (8, 9), (730, 2048, 8192), False),
        (fp8_linear, (9, 0), (15, 2048, 8192), False),
        (fp8_linear, (9, 0), (730, 2048, 8200), False),
        (refuses, (12, 0), (730, 2048, 8192), False),
        (forgets_a_scale, (12, 0), (730, 2048, 8192), False),
    ],
)
def test_products_in_fp8_are_tried_before_they_are_used(
    product: Callable[..., torch.Tensor],
    capability: tuple[int, int],
    sizes: tuple[int, ...],
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quantization._refused_fp8.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(quantization, "fp8_linear", product)
    fallbacks = Fallbacks()
    for _ in range(2):
        assert quantization.supports_fp8_gemm(torch.device("cpu"), fallbacks, *sizes) is wanted
    assert len(caplog.records) == len(fallbacks) == (product is not fp8_linear)
    quantization._refused_fp8.cache_clear()


def test_an_engine_names_its_dtype_and_answers_alike() -> None:
    with Engine.load("nano", "cpu") as whole, Engine.load("nano", "cpu", "fp8") as rounded:
        assert rounded.model.dtype == "fp8"
        image = square(240, 320, SCREEN)
        (wanted,), (got,) = (engine.detect(image, "tv").boxes for engine in (whole, rounded))
        assert got.pixels(1, 1) == pytest.approx(wanted.pixels(1, 1), abs=3e-2)


def test_an_unknown_dtype_is_refused_with_all_there_are() -> None:
    with pytest.raises(EngineError, match="float32, bfloat16, float16, fp8"):
        Engine.load("nano", "cpu", "int4")
    with pytest.raises(EngineError, match="float32, bfloat16, float16, fp8"):
        random_engine("cpu", "int4", config=TINY)
