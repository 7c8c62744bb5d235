"""An encoder that a GPU is needed for is tried when a session is opened, and again after it failed."""

from __future__ import annotations

from typing import Any

import av.error
import numpy as np
import pytest

from saccade.sinks.video import live_encoder
from saccade.sinks.video.live_encoder import Backoff, LiveEncoder, try_encoder

IMAGE = np.zeros((240, 320, 3), np.uint8)


class Gpu:
    """Stands for NVENC, which is not here: sessions that fail at will, and else encode on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.tried, self.now = True, 0, 1000.0
        monkeypatch.setattr(live_encoder, "_backoffs", {name: Backoff() for name in live_encoder._backoffs})
        monkeypatch.setattr(live_encoder.time, "monotonic", lambda: self.now)
        self._open = live_encoder._open
        monkeypatch.setattr(live_encoder, "_open", self.open)

    def open(self, name: str, size: tuple[int, int], rate: float) -> Any:
        if name != "h264_nvenc":
            return self._open(name, size, rate)
        self.tried += 1
        if self.failing:
            raise av.error.ExternalError(542398533, "OpenEncodeSessionEx failed: out of memory (10)")
        return self._open("libx264", size, rate)


def used() -> str:
    encoder = LiveEncoder("H264")
    assert encoder.encode(IMAGE, 0, 25.0) is not None
    return encoder.name


def test_one_failed_session_does_not_rule_the_gpu_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    assert (used(), gpu.tried) == ("libx264", 1)
    assert (used(), gpu.tried) == ("libx264", 1)  # not for each session
    gpu.failing, gpu.now = False, gpu.now + 11
    assert (used(), gpu.tried) == ("h264_nvenc", 2)
    assert (used(), gpu.tried) == ("h264_nvenc", 3)


def test_a_gpu_that_never_works_is_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    for _ in range(3600):
        used_now, gpu.now = used() if gpu.tried < 3 or not int(gpu.now) % 60 else "libx264", gpu.now + 1
        assert used_now == "libx264"
    assert 6 <= gpu.tried <= 14


def test_a_session_that_fails_while_it_runs_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.failing = False
    encoder = LiveEncoder("H264")
    assert encoder.encode(IMAGE, 0, 25.0) is not None
    assert encoder.name == "h264_nvenc"

    class Lost:
        def encode(self, frame: object) -> list[object]:
            raise av.error.ExternalError(542398533, "the device was lost")

    encoder._context, gpu.failing = Lost(), True
    coded = encoder.encode(IMAGE, 3600, 25.0)
    assert coded is not None
    assert coded.key
    assert encoder.name == "libx264"


def test_an_encoder_is_opened_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    try_encoder("libx264")
    Gpu(monkeypatch)
    with pytest.raises(av.error.ExternalError):
        try_encoder("h264_nvenc")
