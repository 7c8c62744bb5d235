"""The benchmark `saccade bench bubble`: predicts and measures the speedup of a pipelined over a blocking engine.

    predicted speedup = T_block / T_pipe · (1 − z)

A blocking engine (depth 1) waits for each decode step. A pipelined engine (depth 2) prepares the next step while the
device runs. T_block and T_pipe are the mean times of their decode steps. z is the fraction of sequences in a pipelined
decode step that are decoded after their end.

The prediction assumes equal batch sizes at both depths.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import Measurement, images_of
from saccade.pipeline.bench.load_generator import (
    Job,
    Measured,
    jobs_of,
    mosaics,
    open_engine,
    run_closed_loop,
    wait_for_rest,
)

if TYPE_CHECKING:
    from saccade.engine import Engine

_ROUNDS = 5  # the depths alternate, so that a change of the machine's speed affects both


@dataclass(slots=True, frozen=True)
class BubbleRow:
    """Step times (in milliseconds) and speedups of a blocking and a pipelined engine at a given number of streams.

    Attributes:
        streams: number of streams. Each stream has one request in flight.
        rows_block, rows_pipe: mean batch size of a decode step, blocking and pipelined.
        forward_ms, sampling_ms: median device time of the forward pass and of sampling, pipelined with a full batch.
        bookkeeping_ms: median CPU time of a pipelined decode step with a full batch, without waiting.
        idle_block_ms, idle_pipe_ms: median idle time of the device per decode step, blocking and pipelined.
        t_block_ms, t_pipe_ms: mean time of a decode step, blocking and pipelined.
        steps: mean number of decode steps per answer.
        zombies: fraction z of the sequences in pipelined decode steps that were decoded after their end.
        predicted: predicted speedup of decoding, T_block / T_pipe · (1 − z).
        observed: measured speedup of decoding, as the ratio of the decode throughputs.
        prefill_ms: mean prefill time of one image, pipelined.
        predicted_answers: predicted speedup including prefills.
        observed_answers: measured speedup including prefills, as the ratio of answers per second.
        answers_per_s: answers per second, pipelined.
    """

    streams: int
    rows_block: float
    rows_pipe: float
    forward_ms: float
    sampling_ms: float
    bookkeeping_ms: float
    idle_block_ms: float
    idle_pipe_ms: float
    t_block_ms: float
    t_pipe_ms: float
    steps: float
    zombies: float
    predicted: float
    observed: float
    prefill_ms: float
    predicted_answers: float
    observed_answers: float
    answers_per_s: float


@dataclass(slots=True, frozen=True)
class BubbleBench(Measurement):
    """The results of the benchmark `saccade bench bubble`, which compares a pipelined with a blocking engine.

    Attributes:
        model, device, dtype: name of the model, device and data type.
        conf: score threshold of the detections.
        rows: results for each number of streams.
    """

    model: str
    device: str
    dtype: str
    conf: float
    rows: list[BubbleRow]

    def as_text(self) -> str:
        """Return the results of `saccade bench bubble` as a table."""
        columns: list[tuple[str, str, str]] = [
            ("", "streams", "{0.streams}"),
            ("rows", "block", "{0.rows_block:.1f}"),
            ("rows", "pipe", "{0.rows_pipe:.1f}"),
            ("", "forward", "{0.forward_ms:.3f}"),
            ("", "sampling", "{0.sampling_ms:.3f}"),
            ("book-", "keeping", "{0.bookkeeping_ms:.3f}"),
            ("idle", "block", "{0.idle_block_ms:.3f}"),
            ("idle", "pipe", "{0.idle_pipe_ms:.3f}"),
            ("period", "T_block", "{0.t_block_ms:.3f}"),
            ("period", "T_pipe", "{0.t_pipe_ms:.3f}"),
            ("", "L", "{0.steps:.1f}"),
            ("", "z", "{0.zombies:.3f}"),
            ("decode", "predicted", "{0.predicted:.3f}"),
            ("speedup", "observed", "{0.observed:.3f}"),
            ("prefill", "/image", "{0.prefill_ms:.2f}"),
            ("answers", "predicted", "{0.predicted_answers:.3f}"),
            ("speedup", "observed", "{0.observed_answers:.3f}"),
            ("answers", "/second", "{0.answers_per_s:.1f}"),
        ]
        lines = ["".join(f"{column[part]:>10}" for column in columns) for part in (0, 1)]
        lines += ["".join(f"{form.format(row):>10}" for _, _, form in columns) for row in self.rows]
        about = f"{self.model} on {self.device} in {self.dtype}; times in ms; conf {self.conf:.4g}"
        return "\n".join([about, *(line.rstrip() for line in lines)])


def time_bubble(
    name: str,
    device: str,
    streams: Sequence[int],
    *,
    dtype: str | None = None,
    seconds: float,
    objects: float = 5.0,
    size: tuple[int, int] = (640, 360),
) -> BubbleBench:
    """Measure the decode steps of a blocking and a pipelined engine under closed-loop load.

    Args:
        name: name or folder of a model, or the name of a model with random weights, such as moondream-2-random.
        device: see `Engine.load`.
        dtype: see `Engine.load`.
        streams: numbers of streams to measure.
        seconds: duration of each measurement, in seconds.
        objects: mean number of objects per answer, at most `MAX_OBJECTS`.
        size: width and height of the images, in pixels.

    Raises:
        EngineError: if the model, device or dtype does not exist.
    """
    images = mosaics(images_of(str(DEMO_CLIP), *size))
    with ExitStack() as stack:
        engines = [stack.enter_context(open_engine(name, device, depth, dtype)) for depth in (1, 2)]
        jobs = jobs_of(engines[1], images, objects)
        rows = [measure_row(engines, jobs, count, seconds) for count in streams]
        model = engines[1].model
        return BubbleBench(model.name, model.device, model.dtype, jobs[0][1].conf, rows)


def measure_row(engines: Sequence[Engine], jobs: Sequence[Job], streams: int, seconds: float) -> BubbleRow:
    """Measure a blocking engine (depth 1) and a pipelined engine (depth 2) with the same number of streams."""
    block, pipe = Measured(), Measured()
    wait_for_rest(engines[1])
    for _ in range(_ROUNDS):
        for engine, measured in zip(engines, (block, pipe), strict=True):
            run_closed_loop(engine, jobs, streams, seconds / _ROUNDS, measured)
    blocking, piped = block.full(streams), pipe.full(streams)
    return BubbleRow(
        streams=streams,
        rows_block=block.mean_rows,
        rows_pipe=pipe.mean_rows,
        forward_ms=1e3 * statistics.median(step.forward for step in piped),
        sampling_ms=1e3 * statistics.median(step.sampling for step in piped),
        bookkeeping_ms=1e3 * statistics.median(step.host for step in piped),
        idle_block_ms=1e3 * statistics.median(s.period - s.forward - s.sampling for s in blocking),
        idle_pipe_ms=1e3 * statistics.median(s.period - s.forward - s.sampling for s in piped),
        t_block_ms=1e3 * block.period,
        t_pipe_ms=1e3 * pipe.period,
        steps=pipe.useful_steps,
        zombies=pipe.zombie_share,
        predicted=block.period / pipe.period * (1 - pipe.zombie_share),
        observed=pipe.useful_rate / block.useful_rate,
        prefill_ms=1e3 * pipe.prefill_s,
        predicted_answers=block.per_answer_s / pipe.per_answer_s,
        observed_answers=(pipe.answers / pipe.elapsed) / (block.answers / block.elapsed),
        answers_per_s=pipe.answers / pipe.elapsed,
    )
