"""`python -m benchmarks decode`: compares the GPU time of decode steps with the memory bandwidth (roofline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.engine.errors import EngineError
from saccade.pipeline.bench.common import Measurement


@dataclass(slots=True, frozen=True)
class DecodeRow:
    """GPU times of decode steps with a given batch size, in milliseconds.

    Attributes:
        rows: batch size: number of sequences per step.
        median_ms, p99_ms: time of the whole step, including sampling.
        sampling_ms: median time to sample the next values.
        floor_ms: roofline: time to read weights and KV cache at the measured memory bandwidth.
        experts: mean number of experts used per layer, or None for a model without experts.
    """

    rows: int
    median_ms: float
    p99_ms: float
    sampling_ms: float
    floor_ms: float
    experts: float | None = None


@dataclass(slots=True, frozen=True)
class DecodeBench(Measurement):
    """GPU times of decode steps, one row per batch size.

    Attributes:
        length: context length of each sequence, in tokens.
        bandwidth: measured memory bandwidth in bytes per second (reads plus writes).
    """

    model: str
    device: str
    dtype: str
    length: int
    bandwidth: float
    rows: tuple[DecodeRow, ...]

    def as_text(self) -> str:
        """Return the GPU times of the decode steps as a text table."""
        lines = [
            f"{self.model}, {self.dtype}, on {self.device}: decode steps at {self.length} keys, in ms",
            f"{'rows':>5} {'median':>8} {'p99':>8} {'sampling':>9} {'roofline':>9}",
        ]
        for row in self.rows:
            line = (
                f"{row.rows:>5} {row.median_ms:>8.3f} {row.p99_ms:>8.3f} {row.sampling_ms:>9.3f} {row.floor_ms:>9.2f}"
            )
            lines.append(line if row.experts is None else f"{line}  {row.experts:.1f} experts a layer")
        return "\n".join([*lines, f"roofline: bytes read once at the {self.bandwidth / 1e12:.2f} TB/s measured here"])


def time_decode(
    model: str,
    device: str,
    counts: Sequence[int],
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    length: int = 760,
    steps: int = 200,
) -> DecodeBench:
    """Measure the GPU time of decode steps for each batch size in `counts`, with `length` tokens per sequence.

    Raises:
        EngineError: if the model cannot be loaded onto a GPU, or if `length` exceeds the context length of the model.
    """
    import numpy as np
    import torch

    from benchmarks.costs import MoondreamCosts
    from benchmarks.device_peaks import bandwidth
    from benchmarks.steps import experts_used, time_sampling, time_step
    from saccade.pipeline.bench.load_generator import dtypes_of, open_engine

    with open_engine(model, device, dtype=dtype, kv_dtype=kv_dtype) as engine:
        time_step(engine, 1, engine.limits.prefix_length, 1)
        costs = MoondreamCosts(engine._loaded.model.config)  # type: ignore[attr-defined]
        least, most = engine.limits.prefix_length + 1, engine.limits.max_context
        if not least <= length <= most:
            raise EngineError(f"--keys: context length {length} is outside {least} to {most} tokens")
        place = torch.device(engine.model.device)
        rate = bandwidth(place)
        rows = []
        for count in counts:
            times = [1e3 * second for second in time_step(engine, count, length - 1, steps)]
            used = experts_used(engine, count)
            rows.append(
                DecodeRow(
                    count,
                    float(np.median(times)),
                    float(np.percentile(times, 99)),
                    1e3 * time_sampling(engine, count),
                    1e3 * costs.decode_bytes(count, length, engine.model.dtype, used, kv_dtype) / rate,
                    used,
                )
            )
        name = torch.cuda.get_device_name(place)
        return DecodeBench(engine.model.name, name, dtypes_of(engine), length, rate, tuple(rows))
