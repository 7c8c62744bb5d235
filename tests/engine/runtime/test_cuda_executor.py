"""Needs neither av nor a conftest: run with `pytest --noconftest` on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
import PIL
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file

from saccade.engine import Caption, Detect, Engine, Point, Query, Result, StreamSettings, SupersededError
from saccade.engine.golden.check import check
from saccade.engine.image import YuvImage, as_array
from saccade.engine.runtime.cuda_executor import CudaExecutor
from saccade.engine.runtime.uploads import StagedImage
from saccade.engine.tasks.task import Task
from tests.support.engine import GOLDEN, SCREEN, noise, square

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture(scope="module", autouse=True)
def float32_is_float32() -> Iterator[None]:
    """TF32 has ten bits: that is another model."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    with Engine.load("nano", "cpu", "float32") as cpu, Engine.load("nano", "cuda", "float32") as cuda:
        yield cpu, cuda


def images() -> list[NDArray[np.uint8]]:
    found = [square(240, 320, SCREEN), noise(200, 300)]
    for path in sorted((GOLDEN / "images").iterdir()):
        with Image.open(path) as file:
            found.append(np.asarray(file.convert("RGB")))
    return found


def test_auto_is_cuda_where_there_is_one() -> None:
    with Engine.load("nano") as engine:
        assert engine.model.device.startswith("cuda")


@pytest.mark.parametrize("conf", [0.5, 0.1])
def test_nano_finds_on_cuda_what_it_finds_on_the_cpu(engines: tuple[Engine, Engine], conf: float) -> None:
    cpu, cuda = engines
    assert cpu.model.classes is not None
    tasks = [task(name, 20, conf) for task in (Detect, Point) for name in cpu.model.classes]
    some = 0
    for image in images():
        wanted, got = (engine.submit(image, tasks).result() for engine in (cpu, cuda))
        assert [box.label for box in got.detections.boxes] == [box.label for box in wanted.detections.boxes]
        for mine, theirs in zip(got.detections.boxes, wanted.detections.boxes, strict=True):
            assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=1e-2)
            assert mine.score == pytest.approx(theirs.score, abs=1e-2)
            some += 1
        for spot, other in zip(got.points.points, wanted.points.points, strict=True):
            assert (spot.label, *spot.pixels(1, 1)) == (
                other.label,
                *(pytest.approx(value, abs=1e-2) for value in other.pixels(1, 1)),
            )
    assert some > 0


def test_keys_and_values_in_fp8_move_no_box_of_nano_far() -> None:
    found = []
    for kv_dtype in (None, "fp8"):
        with Engine.load("nano", "cuda", kv_dtype=kv_dtype) as engine:
            assert engine.model.classes is not None
            tasks = [Detect(name, 20, 0.2) for name in engine.model.classes]
            shown = [*images(), *images()]
            futures = [engine.submit(image, tasks) for image in shown]
            with engine.encode(shown[0]) as encoded:
                last = engine.submit(encoded, tasks).result().detections.boxes
            found.append([box for future in futures for box in future.result().detections.boxes] + [*last])
    assert len(found[0]) == len(found[1]) > 0
    for mine, theirs in zip(*found, strict=True):
        assert mine.label == theirs.label
        assert mine.score == pytest.approx(theirs.score, abs=0.05)
        assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=0.02)


def test_tensors_on_the_device_are_images_too(engines: tuple[Engine, Engine]) -> None:
    _, cuda = engines
    image = square(240, 320, SCREEN)
    assert cuda.detect(torch.from_numpy(image).cuda(), "tv") == cuda.detect(image, "tv")


def test_images_cut_together_are_those_that_pillow_cuts(engines: tuple[Engine, Engine]) -> None:
    """Of several sizes and kinds, one of them too large to wait with the others, one that is there twice."""
    _, cuda = engines
    executor = cuda._executor
    assert isinstance(executor, CudaExecutor)
    encoder, stream = executor._images, executor._compute.stream
    planes = [torch.from_numpy(noise(height, 64)[..., 0]) for height in (64, 32, 32)]
    yuv = YuvImage(planes[0], planes[1][:, ::2], planes[2][:, ::2], (104597, 132201, 25675, 53279), full_range=False)
    decoded = replace(yuv, y=yuv.y.cuda(), u=yuv.u.cuda(), v=yuv.v.cuda())
    shown = [noise(200, 300), square(240, 320, SCREEN), yuv, noise(200, 300, 7), noise(1900, 2000), decoded]

    def cut(slot: int, part: slice) -> NDArray[np.uint8]:
        with mock.patch.object(encoder, "idle", return_value=False):
            images = [encoder.prepare(image) for image in shown]
        images.append(images[0])
        assert [isinstance(image, StagedImage) for image in images] == [True, True, True, True, False, True, True]
        torch.cuda.set_stream(stream)
        try:
            with torch.inference_mode():
                encoder.encode(slot, images[part])
        finally:
            torch.cuda.set_stream(torch.cuda.default_stream())
        stream.synchronize()
        crops: NDArray[np.uint8] = encoder._crops[: len(images[part])].cpu().numpy()
        return crops

    arrays = [as_array(image) for image in (*shown, shown[0])]
    size = (encoder._crops.shape[1],) * 2
    wanted = [np.asarray(Image.fromarray(one).resize(size, Image.Resampling.LANCZOS)) for one in arrays]
    parts = [slice(start, None) for start in (0, 0, 1, 6)]
    for number, part in enumerate([*parts, *(slice(one, one + 1) for one in (0, 1, 2, 3, 5, 2))]):  # alone: a graph
        assert np.array_equal(cuda._loop.run_idle(partial(cut, number % 2, part)), np.stack(wanted[part]))


def test_an_image_that_fails_fails_alone(engines: tuple[Engine, Engine]) -> None:
    _, cuda = engines

    def broken() -> NDArray[np.uint8]:
        raise OSError("no image")

    given = [noise(200, 300), broken, noise(240, 320), noise(200, 300), lambda: np.zeros((4, 4), np.uint8)]
    futures = [cuda.submit(image, [Detect("tv")], stream=number) for number, image in enumerate(given)]
    errors = [type(future.exception(60)) for future in futures]
    assert errors == [type(None), OSError, type(None), type(None), ValueError]


def test_more_images_may_wait_than_fit_pinned_memory(engines: tuple[Engine, Engine]) -> None:
    _, cuda = engines
    images = [noise(1000, 2000, seed) for seed in range(3)]
    wanted = [cuda.submit(image, [Detect("tv", 2, 0.0)]).result().detections for image in images]
    futures = [cuda.submit(images[i % 3], [Detect("tv", 2, 0.0)]) for i in range(60)]
    for number, future in enumerate(futures):
        for mine, theirs in zip(future.result().detections.boxes, wanted[number % 3].boxes, strict=True):
            assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=1e-2)


def test_the_golden_boxes_points_and_texts_on_cuda() -> None:
    quantities = {quantity.name: quantity for quantity in check(GOLDEN, "cuda", tolerance=1e-3)}
    # Pillow before 13 makes one portrait crop in another order of passes: other numbers, though the same boxes.
    current = int(PIL.__version__.split(".")[0]) >= 13
    older = () if current else ("crops", "image embeddings", "hidden states", "logits")
    for name in {"tiling", "crops", "boxes", "points", "texts", "image embeddings", "hidden states", "logits"} - {
        *older
    }:
        assert quantities[name].ok, quantities[name]


MIXED: list[Task] = [
    Detect("dog", 3, 0.0),
    Detect("cat", 6, 0.5),
    Point("dog", 4, 0.0),
    Query("how many?", max_tokens=12),
    Query("what?", max_tokens=9, temperature=1.0, top_p=0.7, seed=7),
    Query("which?", choices=("yes", "no", "not at all")),
    Query("why?", 6, reasoning=True),
    Query("what is it?", 6, refs=((0.25, 0.75), (0.1, 0.2, 0.5, 0.6))),
    Caption("short", max_tokens=5),
]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_launch_that_fails_half_way_changes_no_other_answer(depth: int) -> None:
    shown = images()[2:]
    task = Detect("dog", 3, 0.0)
    with Engine.load(str(GOLDEN), "cpu") as cpu, Engine.load(str(GOLDEN), "cuda", "float32", depth=depth) as cuda:
        wanted = [cpu.submit(image, [task]).result().detections for image in shown]
        assert isinstance(cuda._executor, CudaExecutor)
        steps, calls = cuda._executor._steps, count(1)

        def failing(fill: Callable[..., None]) -> Callable[..., None]:
            def fails(*args: object) -> None:
                if next(calls) % 16 == 0:
                    raise torch.OutOfMemoryError("no more")
                fill(*args)

            return fails

        # Of a prefill, its image is being looked at by then.
        steps.fill, steps.fill_sampled = failing(steps.fill), failing(steps.fill_sampled)  # type: ignore[method-assign]
        failed = 0
        for start in range(20):
            futures = [cuda.submit(image, [task]) for image in shown[start % len(shown) :]]
            for want, future in zip(wanted[start % len(shown) :], futures, strict=True):
                if isinstance(future.exception(60), torch.OutOfMemoryError):
                    failed += 1
                    continue
                for mine, theirs in zip(future.result().detections.boxes, want.boxes, strict=True):
                    assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=1e-2)
        assert 0 < failed < 20 * len(shown)


@pytest.mark.parametrize("depth", [1, 2])
def test_everything_at_once_is_answered_as_on_the_cpu(depth: int) -> None:
    with Engine.load(str(GOLDEN), "cpu") as cpu, Engine.load(str(GOLDEN), "cuda", "float32", depth=depth) as cuda:
        shown = images()[2:]
        wanted = [cpu.submit(image, MIXED).result() for image in shown]
        blank = Query("what is a shelf?", 12)
        about_nothing = [cuda.submit(None, [blank]) for _ in range(3)]
        futures = [cuda.submit(image, MIXED) for image in shown * 4]
        assert {one.result().texts[0].text for one in about_nothing} == {
            cpu.submit(None, [blank]).result().texts[0].text
        }
        for number, future in enumerate(futures):
            got, want = future.result(), wanted[number % len(shown)]
            assert got.texts == want.texts
            assert got.texts[2].probabilities == pytest.approx(want.texts[2].probabilities, rel=1e-3)
            assert [box.label for box in got.detections.boxes] == [box.label for box in want.detections.boxes]
            for mine, theirs in zip(got.detections.boxes, want.detections.boxes, strict=True):
                assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=1e-5)
            assert [spot.pixels(1, 1) for spot in got.points.points] == [
                pytest.approx(spot.pixels(1, 1), abs=1e-5) for spot in want.points.points
            ]


def test_prompts_too_long_for_a_graph_are_read_without_one() -> None:
    question = "how many of them are there? " * 20
    image = noise(100, 140)
    with Engine.load(str(GOLDEN), "cpu") as cpu, Engine.load(str(GOLDEN), "cuda", "float32") as cuda:
        assert cuda.query(image, question, max_tokens=8) == cpu.query(image, question, max_tokens=8)


def test_an_encoded_image_is_asked_without_encoding_it_again() -> None:
    image, asked = noise(400, 640), [Detect("dog", 3, 0.0), Query("how many?", max_tokens=12)]
    with Engine.load(str(GOLDEN), "cuda", "float32") as cuda:
        wanted = cuda.submit(image, asked).result()
        with cuda.encode(image) as encoded:
            futures = [cuda.submit(encoded, asked) for _ in range(4)]
            for future in futures:
                got = future.result()
                assert got.texts == wanted.texts
                assert [box.pixels(1, 1) for box in got.detections.boxes] == [
                    pytest.approx(box.pixels(1, 1), abs=1e-5) for box in wanted.detections.boxes
                ]
        cuda._loop.run_idle(lambda: None)  # behind the release
        assert cuda.counters()["pages_used"] == 0


def test_adapters_on_cuda_answer_as_on_the_cpu(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = {}
    with Engine.load(str(GOLDEN), "cpu") as cpu, Engine.load(str(GOLDEN), "cuda", "float32") as cuda:
        part = cpu._loaded.model.text.blocks[0].get_submodule("mlp.fc1")
        assert isinstance(part, torch.nn.Linear)
        for layer in range(len(cpu._loaded.model.text.blocks)):
            weights[f"text.blocks.{layer}.mlp.fc1.A"] = torch.randn(4, part.in_features, generator=generator) / 8
            weights[f"text.blocks.{layer}.mlp.fc1.B"] = torch.randn(part.out_features, 4, generator=generator) / 8
        save_file(weights, tmp_path / "tilt.safetensors")
        image = noise(100, 140)
        tasks: list[Task] = [Detect("dog", 4, 0.0), Query("how many?", max_tokens=6)]
        results = []
        for engine in (cpu, cuda):
            engine.load_adapter("tilt", tmp_path / "tilt.safetensors")
            futures = [engine.submit(image, tasks, adapter=name) for name in (None, "tilt", None, "tilt")]
            results.append([future.result() for future in futures])
        for want, got in zip(*results, strict=True):
            assert got.texts == want.texts
            for mine, theirs in zip(got.detections.boxes, want.detections.boxes, strict=True):
                assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=1e-5)
        assert results[1][0].detections != results[1][1].detections
        executor = cuda._executor
        assert isinstance(executor, CudaExecutor)
        adapted = {key[:2] for key in executor.graphs._graphs if isinstance(key, tuple) and key[-1] is True}
        assert {("decode", 0), ("decode", 1)} < adapted
        assert any(what == "prefill" for what, _ in adapted)


@pytest.mark.parametrize("traced", [False, True])
def test_a_warm_engine_neither_synchronizes_nor_allocates(engines: tuple[Engine, Engine], traced: bool) -> None:
    _, cuda = engines
    shown = [square(240, 320, SCREEN), noise(240, 320)]
    tasks = [Detect(name, 5, 0.0) for name in ("tv", "person")]

    def run(images: int) -> None:
        for future in [cuda.submit(shown[i % 2], tasks) for i in range(images)]:
            future.result()

    run(64)
    allocations: list[int] = []
    with cuda.tracing() if traced else nullcontext():
        torch.cuda.set_sync_debug_mode("error")
        try:
            # Images that wait take memory, and how many do differs from run to run: it grows until it has seen most.
            while len(allocations) < 4 or (len({*allocations[-4:]}) > 1 and len(allocations) < 40):
                run(24)
                allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len({*allocations[-4:]}) == 1, allocations


def test_half_precision_runs_and_finds_much_the_same(engines: tuple[Engine, Engine]) -> None:
    image = square(240, 320, SCREEN)
    (wanted,) = engines[0].detect(image, "tv").boxes
    with Engine.load("nano", "cuda", "float16") as half:
        (got,) = half.detect(image, "tv").boxes
    assert got.pixels(1, 1) == pytest.approx(wanted.pixels(1, 1), abs=2e-2)


@pytest.mark.parametrize("model", ["nano", str(GOLDEN)])
def test_drafts_change_no_answer(model: str) -> None:
    """Images come twice, and some once more: drafts that are right, wrong, and too long."""
    tasks: list[Task] = [Detect("tv", 6, 0.1), Point("tv", 5, 0.1)]
    if model == "nano":
        tasks += [Detect("person", 20, 0.05), Point("chair", 20, 0.05)]
    else:
        tasks += [Query("how many?", max_tokens=12), Caption("short", max_tokens=7)]
    shown = [image for image in images() for _ in range(2)]

    def places(result: Result) -> object:
        boxes, spots = result.detections.boxes, result.points.points
        return result.texts, [box.pixels(1, 1) for box in boxes], [spot.pixels(1, 1) for spot in spots]

    with Engine.load(model, "cuda", "float32", drafts=False) as engine:
        wanted = [places(engine.submit(image, tasks).result()) for image in shown]
        plain = engine.counters()
    assert plain["draft_values_total"] == 0
    with Engine.load(model, "cuda", "float32") as engine:
        keys = ["door", "yard", "hall"]
        for key in keys:
            engine.configure_stream(key, StreamSettings(newest=False))
        for streams in (keys[:1], keys):  # one by itself, then in batches with others
            before = engine.counters()
            for one, image in zip(wanted, shown, strict=True):  # a frame is drafted from one that is answered
                futures = [engine.submit(image, tasks, stream=key) for key in streams]
                assert [places(future.result()) for future in futures] == [one] * len(streams)
            after = engine.counters()
            assert after["draft_values_accepted_total"] > before["draft_values_accepted_total"]
            steps = after["steps_decode_total"] - before["steps_decode_total"]
            # Those of several streams are no more than if each were by itself, however they come together.
            assert steps < len(streams) * (0.2 if model == "nano" else 1.0) * plain["steps_decode_total"]
        burst = [[engine.submit(image, tasks, stream=key) for key in keys] for image in shown]
        for one, futures in zip(wanted, burst, strict=True):
            assert [places(future.result()) for future in futures] == [one] * len(keys)
        last: Result | None = None
        for one, image in zip(wanted, shown, strict=True):
            last = engine.submit(image, tasks, previous=last).result()
            assert places(last) == one


def test_frames_of_many_streams_are_answered_on_cuda() -> None:
    with Engine.load("nano", "cuda", "float32") as engine:
        shown = images()
        futures = [
            (number % len(shown), engine.submit(shown[number % len(shown)], [Detect("tv")], stream=number % 12))
            for number in range(240)
        ]
        wanted = [engine.detect(image, "tv") for image in shown]
        seen = [(i, future.result()) for i, future in futures if future.exception() is None]
        assert all(isinstance(future.exception(), SupersededError | None) for _, future in futures)
    assert len(seen) >= 12
    for i, result in seen:
        assert len(result.detections) == len(wanted[i])
