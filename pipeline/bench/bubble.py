"""`saccade bench bubble`: what pipelining host and device gains, predicted from the times of a step and observed.

    speedup = T_block / T_pipe · (1 − z)

T_block and T_pipe are the mean periods of a decode step at depth 1 and 2, from the end of the step before it to its
end: of all of them, since those beside a prefill cost the blocking engine more, and are many. z is the share of decoded
sequences wasted because they had ended a step before. Observed are useful decoded sequences, by the engine's
counters, in the wall clock's time without the prefills'. What the model leaves out: it takes steps to have as many
sequences at both depths, wasted ones included. The table shows how many they had.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import images_of
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

_ROUNDS = 5  # the depths take turns, so that a machine that changes its pace changes both


@dataclass(slots=True, frozen=True)
class BubbleRow:
    """A number of streams. Times in milliseconds.

    Attributes:
        streams: in the closed loop.
        rows_block, rows_pipe: mean sequences of a decode step.
        forward_ms, sampling_ms: of a decode step with a full batch, on the device, pipelined: medians, as the next.
        bookkeeping_ms: what the host does for it besides waiting, pipelined.
        idle_block_ms, idle_pipe_ms: of its period, what the device had nothing to do.
        t_block_ms, t_pipe_ms: mean period of all decode steps.
        steps: L, mean decode steps of an answer.
        zombies: z, share of wasted sequences of decode steps, pipelined.
        predicted: speedup of decoding by T_block / T_pipe · (1 − z).
        observed: useful decoded sequences in a second without prefills, pipelined over blocking.
        prefill_ms: mean of one image, pipelined.
        predicted_answers: speedup with the images' prefill, by the times of a step.
        observed_answers: answers a second, pipelined over blocking.
        answers_per_s: pipelined.
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
class BubbleBench:
    """The table of the cost model.

    Attributes:
        model, device, dtype: what ran, and where.
        conf: least score of an object, chosen so that answers have some mean number of them.
        rows: one a number of streams.
    """

    model: str
    device: str
    dtype: str
    conf: float
    rows: list[BubbleRow]

    def as_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """A table."""
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
    """Run the closed loop at depth 1 and 2.

    Args:
        name: as `Engine.load` takes it, or `saccade.engine.golden.random_model.MOONDREAM_2`.
        device: as `Engine.load` takes it.
        dtype: likewise.
        streams: how many, for each row of the table.
        seconds: to measure for each row and depth.
        objects: mean number that answers shall have, `MAX_OBJECTS` at most.
        size: width and height of the images in pixels.

    Raises:
        EngineError: if there is no such model, device or dtype.
    """
    images = mosaics(images_of(str(DEMO_CLIP), *size))
    with ExitStack() as stack:
        engines = [stack.enter_context(open_engine(name, device, depth, dtype)) for depth in (1, 2)]
        jobs = jobs_of(engines[1], images, objects)
        rows = [measure_row(engines, jobs, count, seconds) for count in streams]
        model = engines[1].model
        return BubbleBench(model.name, model.device, model.dtype, jobs[0][1].conf, rows)


def measure_row(engines: Sequence[Engine], jobs: Sequence[Job], streams: int, seconds: float) -> BubbleRow:
    """Measure one number of streams with an engine of depth 1 and one of depth 2."""
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
