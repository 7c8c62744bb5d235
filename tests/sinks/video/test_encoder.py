"""An encoder that a GPU is needed for is tried when a session is opened, and again after it failed."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
import pytest

from saccade.sinks.base import SinkError
from saccade.sinks.video import encoder as module
from saccade.sinks.video.encoder import Backoff, LiveEncoder, Mp4Encoder, VideoFormat, try_encoder
from saccade.sinks.video.mp4_writer import OpenMp4
from tests.support.sinks.results import live_frame

IMAGE = np.zeros((240, 320, 3), np.uint8)


class Gpu:
    """Stands for NVENC, which is not here: sessions that fail at will, and else encode on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.tried, self.now = True, 0, 1000.0
        monkeypatch.setattr(module, "_backoffs", {name: Backoff() for name in module._backoffs})
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        for function in ("_open_live", "_open_for_files"):
            monkeypatch.setattr(module, function, partial(self.open, getattr(module, function)))

    def open(self, opened: Callable[..., Any], name: str, *settings: Any) -> Any:
        if name != "h264_nvenc":
            return opened(name, *settings)
        self.tried += 1
        if self.failing:
            raise av.error.ExternalError(542398533, "OpenEncodeSessionEx failed: out of memory (10)")
        return opened("libx264", *settings)


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


def test_files_and_viewers_share_the_gpu_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, form = Gpu(monkeypatch), VideoFormat(320, 240, Fraction(1), Fraction(1, 1000), Fraction(25))
    assert Mp4Encoder(form).name == "libx264"
    assert (used(), gpu.tried) == ("libx264", 1)
    gpu.failing, gpu.now = False, gpu.now + 11
    assert Mp4Encoder(form).name == "h264_nvenc"


def test_a_session_that_fails_within_a_file_goes_on_in_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, frames = Gpu(monkeypatch), [live_frame(number) for number in range(4)]
    gpu.failing = False
    file = OpenMp4(None, None, from_zero=False)
    file.begin(tmp_path / "a.mp4", frames[0])
    file.add(frames[0], frames[0].image)
    assert file._encoder is not None
    assert file._encoder.name == "h264_nvenc"

    class Lost:
        def encode(self, frame: object) -> list[object]:
            raise av.error.ExternalError(542398533, "the device was lost")

    monkeypatch.setattr(file._encoder, "_stream", Lost())
    gpu.failing = True
    with pytest.raises(SinkError):
        file.add(frames[1], frames[1].image)
    file.begin(tmp_path / "b.mp4", frames[2])
    file.add(frames[2], frames[2].image)
    file.add(frames[3], frames[3].image)
    file.end()
    assert file._encoder.name == "libx264"
    with av.open(str(tmp_path / "b.mp4")) as container:
        assert len(list(container.decode(video=0))) == 2
