"""Frames of streams through the engine: the newest is run, and nothing is done for the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from saccade.engine import DeadlineError, Detect, Engine, Query, StreamSettings, SupersededError
from saccade.engine.image import YuvImage
from tests.support.engine import Held, noise, same

WAIT_S = 60
IMAGE = noise(16, 16)
GOOD = Detect("x", 2, 0.0)
BT_601 = ((104597, 132201, 25675, 53279), False)


@pytest.fixture(params=[1, 2])
def tiny(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(str(folder), "cpu", depth=request.param) as engine:
        yield engine


def test_only_the_newest_of_the_frames_that_wait_is_cut(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[int] = []
    prepare = tiny._maker.cut

    def count(image: Any, region: Any) -> Any:
        cut.append(int(image[0, 0, 0]))
        return prepare(image, region)

    monkeypatch.setattr(tiny, "_maker", replace(tiny._maker, cut=count))
    held = Held(tiny, np.full((8, 8, 3), 200, np.uint8))
    frames = [np.full((16, 16, 3), number, np.uint8) for number in range(6)]
    futures = [tiny.submit(frame, [GOOD], stream=("door", number % 2)) for number, frame in enumerate(frames)]
    held.release()
    wait(futures, WAIT_S)
    assert cut == [200, 4, 5] or cut == [200, 5, 4]
    assert [isinstance(future.exception(), SupersededError) for future in futures] == [True] * 4 + [False] * 2
    for frame, future in zip(frames[4:], futures[4:], strict=True):
        assert same(future.result(), tiny.submit(frame, [GOOD]).result(WAIT_S))
    assert tiny.counters()["requests_superseded_total"] == 4


def test_a_replaced_frame_ends_while_the_loop_is_busy(tiny: Engine) -> None:
    held = Held(tiny, IMAGE)
    frames = [tiny.submit(IMAGE, [GOOD], stream="door") for _ in range(4)]
    tiny.configure_stream("file", StreamSettings(newest=False))
    kept = [tiny.submit(IMAGE, [GOOD], stream="file") for _ in range(3)]
    assert [future.done() for future in frames] == [True, True, True, False]  # none of them keeps its image
    held.release()
    assert all(same(future.result(WAIT_S), kept[0].result()) for future in [frames[3], *kept])


def test_settings_of_another_type_do_not_end_the_engine(tiny: Engine) -> None:
    for wrong in (5, None, {"weight": 2}):
        with pytest.raises(ValueError, match="settings must be StreamSettings; got"):
            tiny.configure_stream("door", wrong)  # type: ignore[arg-type]
    assert tiny.submit(IMAGE, [GOOD], stream="door").result(WAIT_S)


def test_an_image_is_made_when_its_turn_comes(tiny: Engine) -> None:
    made: list[int] = []

    def make(number: int) -> NDArray[np.uint8]:
        made.append(number)
        return IMAGE

    held = Held(tiny, IMAGE)
    futures = [tiny.submit(lambda n=n: make(n), [GOOD, Query("?", 3)], stream="door") for n in range(3)]
    held.release()
    assert same(futures[2].result(WAIT_S), tiny.submit(IMAGE, [GOOD, Query("?", 3)]).result(WAIT_S))
    assert made == [2]
    tiled = tiny.submit(lambda: IMAGE, [GOOD], 2, stream="door").result(WAIT_S)
    assert same(tiled, tiny.submit(IMAGE, [GOOD], 2).result(WAIT_S))


@pytest.mark.parametrize("tiles", [1, 2])
def test_no_image_is_converted_in_the_engines_thread(tiny: Engine, monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    """A 4K frame takes 10 ms and more, in which no step of any stream would be launched."""
    threads: list[str] = []

    def note(*_: object) -> None:
        threads.append(threading.current_thread().name)

    def make() -> YuvImage:
        note()
        return YuvImage(torch.full((16, 24), 90, dtype=torch.uint8), *torch.full((2, 8, 12), 99).byte(), *BT_601)

    rgb = YuvImage.rgb
    monkeypatch.setattr(YuvImage, "rgb", lambda image: note() or rgb(image))
    for tasks in ([GOOD], [GOOD, Detect("y", 0)], [Detect("y", 0)]):
        result = tiny.submit(make, tasks, tiles, stream="door").result(WAIT_S)
        assert (result.detections.width, result.detections.height) == (24, 16)
    assert len(threads) == 5, "an image is made once, and converted once for all its tiles"
    assert "saccade-engine" not in threads


def test_an_image_that_cannot_be_made_ends_its_frame_only(tiny: Engine) -> None:
    def fail() -> NDArray[np.uint8]:
        raise OSError("the decoder is gone")

    with pytest.raises(OSError, match="decoder"):
        tiny.submit(fail, [GOOD], stream="door").result(WAIT_S)
    with pytest.raises(ValueError, match="uint8 RGB"):
        tiny.submit(lambda: IMAGE[..., 0], [GOOD], stream="door").result(WAIT_S)
    broken = tiny.submit(IMAGE, [Detect("漢字", 2, 0.0)], stream="door")
    assert broken.exception(WAIT_S) is not None
    assert len(tiny.submit(IMAGE, [GOOD], stream="door").result(WAIT_S).detections) == 2


def test_frames_that_wait_are_cancelled_expire_and_close(folder: Path) -> None:
    with Engine.load(str(folder), "cpu") as tiny:
        held = Held(tiny, IMAGE)
        cancelled, late, closed = (
            tiny.submit(IMAGE, [GOOD], stream=key, deadline_s=0.05 if key == 1 else None) for key in range(3)
        )
        assert cancelled.cancel()
        threading.Timer(0.2, held.release).start()
        with pytest.raises(DeadlineError, match="before the prefill"):
            late.result(WAIT_S)
        assert closed.result(WAIT_S)
        assert tiny._loop._scheduler.at_rest


def test_all_frames_of_a_stream_that_keeps_them_are_run(tiny: Engine) -> None:
    tiny.configure_stream("file", StreamSettings(newest=False))
    futures = [tiny.submit(noise(16, 16, seed), [GOOD], stream="file") for seed in range(5)]
    assert all(len(future.result(WAIT_S).detections) == 2 for future in futures)
    tiny.forget_stream("file")


def test_a_stream_waits_for_its_rate(tiny: Engine) -> None:
    tiny.configure_stream("slow", StreamSettings(max_fps=2.0))
    first, second = tiny.submit(IMAGE, [GOOD], stream="slow"), None
    first.result(WAIT_S)
    second = tiny.submit(IMAGE, [GOOD], stream="slow")
    assert same(first.result(), second.result(WAIT_S))
    began = [future.result().timings for future in (first, second)]
    assert sum(one.queue_ms + one.prefill_ms + one.decode_ms for one in began) > 450
