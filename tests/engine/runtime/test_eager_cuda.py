"""What the executor for CUDA computes, on a CPU: see `tests.support.engine.eager_cuda`."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from saccade.engine import Caption, Detect, Engine, Point, Query, Result, Segment, StreamSettings, Task
from saccade.engine.config import EngineConfig
from saccade.engine.runtime.cuda_executor import CudaExecutor
from saccade.sources import open_source
from tests.support import REPO
from tests.support.engine import noise
from tests.support.engine.eager_cuda import Now, eager_cuda_engine
from tests.support.engine.material import write_enclosing_model

WAIT_S = 60
CLIP = REPO / "pipeline" / "assets" / "demo.mp4"


def places(result: Result) -> object:
    boxes = [(box.label, box.x1, box.y1, box.x2, box.y2) for box in result.detections.boxes]
    return boxes, [(spot.label, spot.x, spot.y) for spot in result.points.points], result.texts


def test_nano_drafts_on_cuda_from_what_its_detector_finds() -> None:
    with open_source(CLIP, end=1.0, vid_stride=12) as source:
        images = [frame.image for frame in source]
    images.append(np.tile(images[-1][::4, ::4], (3, 3, 1)))
    tasks: list[Task] = [Detect("person", conf=0.2), Point("person", conf=0.2), Detect("car", conf=0.05)]
    results, steps = [], []
    for drafts in (False, True):
        config = EngineConfig(drafts=drafts, images_per_prefill=3)
        with eager_cuda_engine("nano", config) as engine:
            futures = [engine.submit(image, tasks) for image in (*images, images[0])]
            results.append([places(future.result(WAIT_S)) for future in futures])
            steps.append(engine.counters()["steps_decode_total"])
    assert results[1] == results[0]
    assert steps[1] <= 2 < 0.2 * steps[0]


def test_keys_and_values_in_fp8_move_no_box_far() -> None:
    with open_source(CLIP, end=3.0, vid_stride=8) as source:
        images = [frame.image for frame in source]
    found = []
    for kv_dtype in (None, "fp8"):
        with eager_cuda_engine("nano", EngineConfig(kv_dtype=kv_dtype)) as engine, engine.encode(images[0]) as encoded:
            of_all = [engine.detect(image, "person", conf=0.2).boxes for image in (*images, encoded)]
            found.append([box for boxes in of_all for box in boxes])
    assert len(found[0]) == len(found[1]) > 2
    for mine, theirs in zip(*found, strict=True):
        assert mine.score == pytest.approx(theirs.score, abs=0.05)
        assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=0.01)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_drafts_on_cuda_from_its_last_answer(folder: Path, depth: int) -> None:
    images = [noise(16, 16, seed // 2) for seed in range(4)]
    tasks: list[Task] = [Detect("dog", 4, 0.0), Query("how many?", 9), Caption("short", max_tokens=5)]

    def steps(engine: Engine) -> float:
        return engine.counters()["steps_decode_total"]

    with eager_cuda_engine(str(folder), EngineConfig(depth)) as engine:
        engine.configure_stream("door", StreamSettings(newest=False))
        wanted = [places(engine.submit(image, tasks).result(WAIT_S)) for image in images]
        plain = steps(engine)
        assert [places(engine.submit(image, tasks, stream="door").result(WAIT_S)) for image in images] == wanted
        assert steps(engine) - plain < 0.8 * plain
        burst = [engine.submit(image, tasks, stream="door") for image in images]
        assert [places(future.result(WAIT_S)) for future in burst] == wanted


def test_few_graphs_are_captured_before_the_first_step(folder: Path) -> None:
    """As many as for Moondream 2, which differs in none of the sizes that they are captured for."""
    with eager_cuda_engine(str(folder), EngineConfig(2)) as engine:
        executor = engine._executor
        assert isinstance(executor, CudaExecutor)
        first = {key for key, _ in executor._jobs(executor._images, texts=True)}
        assert 20 < len(first) <= 150
        engine.submit(noise(16, 16), [Detect("dog", 4, 0.0)]).result(WAIT_S)
        engine.submit(noise(16, 16), [Query("how many?", 9)]).result(WAIT_S)
        assert first.issuperset(executor.graphs._graphs), "one prompt on one image meets nothing else"


@pytest.mark.parametrize("part", ["launch", "finalize"])
def test_a_step_that_fails_leaves_the_device_idle(folder: Path, part: str) -> None:
    lost, tasks = RuntimeError("lost"), [Detect("dog", 4, 0.0)]
    with eager_cuda_engine(str(folder), EngineConfig(2)) as engine:
        executor = engine._executor
        assert isinstance(executor, CudaExecutor)
        broken = (executor, "_prefill") if part == "launch" else (executor._sampling_inputs, "send")
        with mock.patch.object(*broken, side_effect=lost):
            assert engine.submit(noise(16, 16), tasks).exception(WAIT_S) is lost
        assert engine._loop.run_idle(executor._images.idle)
        engine.submit(noise(16, 16), tasks).result(WAIT_S)
        assert engine._loop.run_idle(executor._images.idle)


def test_a_dropped_executor_is_gone_without_a_garbage_collection(folder: Path) -> None:
    with eager_cuda_engine(str(folder), EngineConfig(2)) as engine:
        graph = "saccade.engine.runtime.graph_capture.captured"
        with mock.patch(graph, Now):  # a call would keep the executor
            executor = CudaExecutor(engine._loaded.model, EngineConfig(2), 64)
        gc.disable()
        try:
            dropped = weakref.ref(executor)
            del executor
            assert dropped() is None
        finally:
            gc.enable()


def test_outlines_beside_other_answers_are_those_of_a_cpu(tmp_path: Path) -> None:
    folder = write_enclosing_model(tmp_path / "tiny")
    tasks: list[Task] = [
        *(Segment(name, max_tokens=20 + 5 * number) for number, name in enumerate(("200", "300", "400"))),
        Query("300", 12),
        Detect("300", 3, 0.0),
        Segment("300", max_tokens=20, temperature=2.0, seed=5),
        Segment("300", max_tokens=20, grammar=False),
    ]
    images, found = [noise(40, 60, seed) for seed in range(3)], []
    for start in (lambda: Engine.load(str(folder), "cpu"), lambda: eager_cuda_engine(str(folder), EngineConfig(2))):
        with start() as engine:
            together = [engine.submit(image, tasks[:5]).result(WAIT_S) for image in images]
            together += [future.result(WAIT_S) for future in [engine.submit(image, tasks) for image in images]]
            found.append([(one.segments, places(one)) for one in together])
    assert found[0] == found[1]
    assert len({outline.path for outlines, _ in found[0] for outline in outlines}) > 4
