from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prompts import PromptsBench, measure_prompts
from saccade.engine import Engine
from saccade.engine.golden.random_model import random_engine
from saccade.engine.models.moondream.random_weights import random_model
from saccade.engine.runtime.monitor import Span, Trace
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.bubble import BubbleBench, measure_row
from saccade.pipeline.bench.common import images_of, parse_counts
from saccade.pipeline.bench.load_generator import (
    Measured,
    StepTimes,
    conf_for,
    jobs_of,
    mosaics,
    open_engine,
    run_closed_loop,
    step_times,
)
from saccade.pipeline.cli.trace_file import check_file, traced
from saccade.pipeline.errors import ConfigError
from saccade.sources import RgbImage
from tests.support.engine import TINY, one_thread


@pytest.fixture(scope="module", autouse=True)
def small_tensors() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def images() -> list[RgbImage]:
    return mosaics(images_of(str(DEMO_CLIP), 33, 20)[:8])


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    with random_engine("cpu", depth=1, config=TINY) as block, random_engine("cpu", depth=2, config=TINY) as pipe:
        yield [block, pipe]


@pytest.mark.parametrize(
    ("scores", "objects", "lengths"),
    [
        ([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6]], 1.0, [1, 1]),
        ([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6]], 2.0, [1, 3]),
        ([[0.2, 0.2], [0.5, 0.4]], 1.0, [0, 2]),
        ([[0.9, 0.8]], 50.0, [1]),  # more than there is: as many as can be distinguished
    ],
)
def test_the_confidence_gives_answers_of_the_length_wanted(
    scores: list[list[float]], objects: float, lengths: list[int]
) -> None:
    conf = conf_for(scores, objects)
    got = [next((i for i, score in enumerate(answer) if not score > conf), len(answer)) for answer in scores]
    assert got == lengths


def test_jobs_end_at_different_lengths_with_the_mean_wanted(engines: list[Engine], images: list[RgbImage]) -> None:
    jobs = jobs_of(engines[1], images, 4.0, most=8)
    found = [len(engines[1].submit(image, [task]).result(60).detections) for image, task in jobs]
    assert len({task.conf for _, task in jobs}) == 1
    assert len(set(found)) > 2
    assert 2 < np.mean(found) < 6


def test_answers_of_random_weights_end_soon_or_late(engines: list[Engine], images: list[RgbImage]) -> None:
    jobs = jobs_of(engines[1], images, 5.0)
    found = [len(engines[1].submit(image, [task]).result(60).detections) for image, task in jobs]
    few, some, many = np.percentile(found, [25, 50, 75])
    assert few < some < many
    assert max(found) > 10
    assert np.mean(np.array(found) > 40) < 0.1


def test_mosaics_are_of_the_size_of_their_images(images: list[RgbImage]) -> None:
    assert {image.shape for image in images} == {(20, 33, 3)}
    assert len({image.tobytes() for image in images}) == len(images)


def test_a_row_adds_up(engines: list[Engine], images: list[RgbImage]) -> None:
    jobs = jobs_of(engines[1], images, 3.0, most=8)
    row = measure_row(engines, jobs, streams=3, seconds=1.2)
    assert row.streams == 3
    assert 0 < row.rows_block <= 3
    assert 0 < row.rows_pipe <= 3
    assert 0 < row.zombies < 0.5
    assert row.steps > 1
    assert row.predicted == pytest.approx(row.t_block_ms / row.t_pipe_ms * (1 - row.zombies))
    assert row.forward_ms > 0
    assert row.sampling_ms >= 0  # on a CPU the forward of the step samples coordinates
    assert min(row.idle_block_ms, row.idle_pipe_ms) >= 0
    assert row.bookkeeping_ms > 0
    # How fast threads of a tiny model alternate on a busy machine shows nothing; lost time or sequences would.
    assert row.observed == pytest.approx(row.predicted * row.rows_pipe / row.rows_block, rel=0.1)
    assert row.observed_answers == pytest.approx(row.predicted_answers, rel=0.1)
    assert min(row.answers_per_s, row.prefill_ms) > 0
    bench = BubbleBench("random", "cpu", "float32", 0.3, [row])
    assert json.loads(bench.as_json())["rows"][0]["streams"] == 3
    lines = bench.as_text().splitlines()
    assert len(lines) == 4, lines
    assert len(lines[-1].split()) == len(lines[-2].split()) == 18


def test_only_a_pipelined_engine_wastes_rows(engines: list[Engine], images: list[RgbImage]) -> None:
    jobs = jobs_of(engines[1], images, 3.0, most=8)
    seen = []
    for engine in engines:
        measured = Measured()
        run_closed_loop(engine, jobs, 2, 0.3, measured)
        assert measured.answers > 0
        assert engine.counters()["sequences_decoding"] == 0
        seen.append(measured.zombies)
    assert seen[0] == 0
    assert seen[1] > 0


def test_steps_are_read_from_a_trace() -> None:
    trace = Trace()

    def span(name: str, track: str, start: float, end: float, step: int, kind: str = "decode", rows: int = 4) -> None:
        trace.add(Span(name, track, start, end, {"step": step, "kind": kind, "rows": rows}))

    span("prefill", "compute", 0, 5, 1, "prefill", 2)
    span("decode", "compute", 6, 8, 2)
    span("sample", "compute", 9, 10, 2)
    span("decode", "compute", 12, 14, 3)
    span("decode", "compute", 15, 16, 5)  # the one before it is missing
    for name, start, end in (("launch", 5, 6), ("finalize", 8, 8.5), ("wait", 9, 10.5), ("commit", 10.5, 12)):
        span(name, "host", start, end, 2)
    span("launch", "host", 11, 12, 3)
    trace.add(Span("schedule", "host", 4, 4.25))
    assert step_times(trace) == [
        StepTimes(decode=True, rows=4, end=10, period=5, forward=2, sampling=1, host=3.25),
        StepTimes(decode=True, rows=4, end=14, period=4, forward=2, sampling=0, host=1.25),
    ]


def test_prompts_on_one_image_hold_its_pages_once(engines: list[Engine], images: list[RgbImage]) -> None:
    one, four = (measure_prompts(engines[1], images[0], count, rounds=2) for count in (1, 4))
    assert one.together_pages == one.apart_pages
    # 17 tokens of the image lie on 2 pages of 16; each prompt needs as many as another of its length.
    assert four.apart_pages - four.together_pages == 3 * 2
    assert four.together_ms > 0
    bench = PromptsBench("random", "cpu", "float32", [one, four])
    assert len(bench.as_text().splitlines()) == 4
    assert json.loads(bench.as_json())["rows"][1]["prompts"] == 4


def test_random_weights_are_those_of_their_seed(images: list[RgbImage]) -> None:
    import torch

    one, same, other = (random_model(TINY, torch.device("cpu"), torch.float32, seed) for seed in (0, 0, 1))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert bool(a.isfinite().all()), name
        assert a.std() == 0 or not torch.equal(a, c), name


def test_models_are_opened_by_name() -> None:
    with open_engine("nano", "cpu", 2, "bfloat16") as engine:
        assert (engine.model.name, engine.model.dtype) == ("nano", "bfloat16")


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,x", "65", "-1", "1.5"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--streams"):
        parse_counts(text, "--streams")


def test_counts_are_read() -> None:
    assert parse_counts("1, 8,64", "--streams") == [1, 8, 64]


def test_a_trace_is_written_also_when_the_run_fails(engines: list[Engine], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), traced(engines[0], path):
        raise ZeroDivisionError
    assert json.loads(path.read_text())["traceEvents"]


def test_no_trace_where_it_cannot_be(engines: list[Engine], tmp_path: Path) -> None:
    check_file(None)
    check_file(tmp_path / "trace.json")
    for path in (tmp_path / "film.mp4", tmp_path / "none" / "trace.json"):
        with pytest.raises(ConfigError, match="--trace"):
            check_file(path)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="--trace"):
        check_file(tmp_path / "folder.json")
    with pytest.raises(ConfigError, match="--trace"), traced(engines[0], tmp_path / "folder.json"):
        pass
