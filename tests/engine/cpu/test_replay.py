from __future__ import annotations

import torch

from saccade.engine.cpu.layers import RECORDED_AFTER, PackedPicoDet, Replay
from saccade.engine.errors import Fallbacks
from saccade.engine.models.nano.picodet import PicoDet
from tests.support.engine.onednn import HAS_BFLOAT16, needs_onednn


class Counted:
    """Adds a weight, and counts how often Python does."""

    def __init__(self) -> None:
        self.calls, self.weight = 0, torch.ones(3)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        return (x + self.weight, x.sum())


@torch.inference_mode()
def test_a_shape_that_comes_often_is_done_without_python() -> None:
    counted = Counted()
    replay = Replay(counted, counted, Fallbacks())
    for number in range(RECORDED_AFTER + 3):
        more, total = replay(torch.full((3,), float(number)))
        assert (more.tolist(), float(total)) == ([number + 1.0] * 3, 3.0 * number)
    assert counted.calls == RECORDED_AFTER + 2  # once more for the record
    replay(torch.zeros(2, 3))
    assert counted.calls == RECORDED_AFTER + 3


@torch.inference_mode()
def test_what_cannot_be_recorded_is_called_as_before() -> None:
    def refuses(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError("not this one")
        return (x + 1,)

    replay = Replay(refuses, None, fallbacks := Fallbacks())
    assert [replay(torch.tensor(1))[0].item() for _ in range(RECORDED_AFTER + 3)] == [2] * (RECORDED_AFTER + 3)
    assert fallbacks == ["the detector is slower, because torch.jit.trace failed: not this one"]


@needs_onednn
@torch.inference_mode()
def test_a_replayed_detector_says_the_same_to_the_bit() -> None:
    torch.manual_seed(0)
    plain = PicoDet(5, 2).eval().requires_grad_(False)
    dtype = torch.bfloat16 if HAS_BFLOAT16 else torch.float32
    once, often = PackedPicoDet(plain, dtype), PackedPicoDet(plain, dtype)
    for number in range(RECORDED_AFTER + 3):
        crops = torch.randn(1, 3, 64, 96).to(memory_format=torch.channels_last)
        got = often(crops)
        if number in (0, RECORDED_AFTER + 1, RECORDED_AFTER + 2):
            wanted = once(crops)
            for name in ("features", "classes", "sides", "grid"):
                assert torch.equal(getattr(got, name), getattr(wanted, name)), name
