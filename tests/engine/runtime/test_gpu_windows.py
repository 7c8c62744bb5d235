"""Windows on a GPU: cut where the frame is, and prefilled with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from saccade.engine import Detect, Engine, Window
from saccade.engine.golden.random_model import random_engine
from saccade.engine.image import YuvImage
from saccade.engine.runtime.uploads import StagedImage
from saccade.engine.tasks.task import windows
from tests.support.engine import noise

WAIT_S = 120
WHERE = [Window(100, 200, 416, 416), Window(1200, 500, 520, 520)]
TASKS = [Detect("person", 4, 0.0)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    with Engine.load("nano", "cuda") as engine:
        yield engine


def frame() -> YuvImage:
    """A frame in main memory, in NV12, with rows that are longer than they are shown."""
    y = torch.from_numpy(noise(1080, 2048)[..., 0].copy())[:, :1920]
    u, v = torch.from_numpy(noise(540, 1024, 1)[..., :2].copy())[:, :960].unbind(-1)
    return YuvImage(y, u, v, (117489, 138438, 13975, 34925), full_range=False)


def boxes_of(engine: Engine, image: object) -> tuple[tuple[float, ...], ...]:
    found = engine.submit(image, TASKS, windows=WHERE).result(WAIT_S).detections.boxes  # type: ignore[arg-type]
    return tuple((one.score, one.x1, one.y1, one.x2, one.y2) for one in found)


def test_a_decoded_frame_s_windows_are_those_of_the_same_frame_in_main_memory(nano: Engine) -> None:
    here = frame()
    there = replace(here, y=here.y.cuda(), u=here.u.cuda(), v=here.v.cuda())
    wanted = boxes_of(nano, here.rgb().numpy())
    for image in (here, there):
        found = boxes_of(nano, image)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, abs=1e-3)


def test_windows_are_prefilled_with_their_frame(nano: Engine) -> None:
    boxes_of(nano, frame())
    before = nano.counters()
    boxes_of(nano, frame())
    after = nano.counters()
    assert after["steps_prefill_total"] - before["steps_prefill_total"] == 1
    assert after["sequences_prefill_total"] - before["sequences_prefill_total"] == 3


def test_nothing_waits_for_the_device_while_windows_of_a_decoded_frame_are_prepared(nano: Engine) -> None:
    here = frame()
    there = replace(here, y=here.y.cuda(), u=here.u.cuda(), v=here.v.cuda())
    boxes_of(nano, there)  # kernels are compiled for its sizes
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for window in WHERE:
            part = there.part(window.x, window.y, window.width, window.height)
            staged = nano._executor.prepare(there, window)
            assert isinstance(staged, StagedImage)
            assert isinstance(staged.place, torch.Tensor)
            starts = [staged.place.data_ptr() + plane for plane in staged.planes]
            assert starts == [plane.data_ptr() for plane in (part.y, part.u, part.v)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_model_of_published_dimensions_answers_windows_as_tiles() -> None:
    image = noise(1000, 1600)
    with random_engine("cuda", None, 2, name="moondream-2-random") as engine:
        tiles = engine.submit(image, TASKS, 2).result(WAIT_S).detections.boxes
        given = engine.submit(image, TASKS, windows=windows(1600, 1000, 2)[1:]).result(WAIT_S).detections.boxes
    assert [(one.x1, one.y1, one.x2, one.y2) for one in given] == [(one.x1, one.y1, one.x2, one.y2) for one in tiles]
