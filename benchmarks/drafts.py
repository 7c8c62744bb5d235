"""`python -m benchmarks drafts`: measures speculative decoding with the previous frame's answer as draft.

The answers come from a model that watches video clips, or are predefined. With predefined answers, the number of boxes
that change between frames is known, and the model may have random weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from saccade.engine.core.admission import StreamSettings
from saccade.engine.models.protocol import Phase
from saccade.engine.tasks import Detect
from saccade.engine.tasks.objects import BoxesOutput
from saccade.engine.tasks.task import FedValue, OutputState, Sampled
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import Measurement, images_of
from saccade.pipeline.bench.load_generator import open_engine
from saccade.sources import RgbImage, open_source

if TYPE_CHECKING:
    from saccade.engine import Engine
    from saccade.engine.models.protocol import Prompts
    from saccade.engine.results import Result
    from saccade.engine.tasks.task import OnText

_ALL = StreamSettings(newest=False)
_LONG_S = 120.0
_BINS = 1024
_WARM_UP = 10  # frames of each row that are not counted


@dataclass(slots=True, frozen=True)
class ClipRow:
    """Results for one clip, with and without speculative decoding.

    Attributes:
        clip: name of the clip.
        frames: number of frames.
        objects: mean number of boxes per frame.
        plain, drafted: mean decode steps per frame, without and with speculative decoding.
        plain_ms, drafted_ms: median time per frame, without and with speculative decoding.
        accepted: fraction of the drafted values that the model accepted.
        differ: number of frames whose boxes change if speculative decoding is used.
    """

    clip: str
    frames: int
    objects: float
    plain: float
    drafted: float
    plain_ms: float
    drafted_ms: float
    accepted: float
    differ: int


@dataclass(slots=True, frozen=True)
class ScriptedRow:
    """Results of speculative decoding with predefined answers.

    Attributes:
        objects: number of boxes per answer.
        moved: number of boxes that differ from the previous frame; None for the run without speculative decoding.
        steps: mean decode steps per frame.
    """

    objects: int
    moved: int | None
    steps: float
    median_ms: float
    p99_ms: float


@dataclass(slots=True, frozen=True)
class DraftsBench(Measurement):
    """Results of the speculative decoding benchmark, one row per clip or per number of changed boxes."""

    model: str
    device: str
    dtype: str
    rows: tuple[ClipRow | ScriptedRow, ...]

    def as_text(self) -> str:
        """Return the speculative decoding results as text tables."""
        lines = [f"{self.model} on {self.device} in {self.dtype}"]
        clips = [row for row in self.rows if isinstance(row, ClipRow)]
        if clips:
            lines.append(
                f"{'clip':<28} {'frames':>6} {'objects':>8} {'steps plain':>12} {'drafted':>8} "
                f"{'ms plain':>9} {'drafted':>8} {'accepted':>9} {'differ':>7}"
            )
        for row in clips:
            lines.append(
                f"{row.clip:<28} {row.frames:>6} {row.objects:>8.2f} {row.plain:>12.2f} {row.drafted:>8.2f} "
                f"{row.plain_ms:>9.1f} {row.drafted_ms:>8.1f} {100 * row.accepted:>7.0f} % {row.differ:>7}"
            )
        for one in self.rows:
            if isinstance(one, ScriptedRow):
                how = "no draft" if one.moved is None else f"{one.moved} of {one.objects} moved"
                lines.append(
                    f"{one.objects} objects, {how:<12} median {one.median_ms:6.2f} ms, p99 {one.p99_ms:6.2f}, "
                    f"{one.steps:.2f} decode steps"
                )
        return "\n".join(lines)


def time_drafts(
    model: str,
    device: str,
    clips: Sequence[str],
    *,
    dtype: str | None = None,
    label: str = "person",
    frames: int = 100,
    stride: int = 1,
) -> DraftsBench:
    """Detect objects in video clips, with and without speculative decoding.

    Args:
        model: name, folder or Hugging Face Hub ID of a model, or `moondream-2-random`.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        clips: video files.
        dtype: name of the dtype, or None for the device's default.
        label: label to detect.
        frames: maximum number of frames per clip.
        stride: use every Nth frame.

    Raises:
        EngineError: if the model cannot be loaded.
        SourceError: if a clip cannot be read.
    """
    with (
        open_engine(model, device, dtype=dtype, drafts=False) as undrafted,
        open_engine(model, device, dtype=dtype, drafts=True) as engine,
    ):
        rows = []
        for clip in clips:
            with open_source(clip, vid_stride=stride) as source:
                images = [np.ascontiguousarray(frame.image) for frame in islice(source, frames)]
                name = source.name
            engine.configure_stream(name, _ALL)
            for one in (undrafted, engine):
                one.submit(images[0], [Detect(label)]).result(_LONG_S)
            plain, steps, plain_ms, _ = _asked(undrafted, images, label, None)
            drafted, fewer, drafted_ms, accepted = _asked(engine, images, label, name)
            rows.append(
                ClipRow(
                    name,
                    len(images),
                    float(np.mean([len(one.detections) for one in plain])),
                    steps,
                    fewer,
                    plain_ms,
                    drafted_ms,
                    accepted,
                    sum(_places(a) != _places(b) for a, b in zip(plain, drafted, strict=True)),
                )
            )
        info = engine.model
    return DraftsBench(info.name, info.device, info.dtype, tuple(rows))


def _asked(
    engine: Engine, images: Sequence[RgbImage], label: str, key: str | None
) -> tuple[list[Result], float, float, float]:
    """Detect the objects of a label in each image, one image after another.

    Returns:
        The results, the mean decode steps per image, the median time per image in milliseconds, and the fraction of the
        drafted values that the model accepted.
    """
    before, results, waits = engine.counters(), [], []
    for image in images:
        begun = time.perf_counter()
        results.append(engine.submit(image, [Detect(label)], stream=key).result(_LONG_S))
        waits.append(1e3 * (time.perf_counter() - begun))
    grown = {name: value - before[name] for name, value in engine.counters().items()}
    fed = grown["draft_values_total"]
    accepted = grown["draft_values_accepted_total"] / fed if fed else 0.0
    return results, grown["steps_decode_total"] / len(images), float(np.median(waits)), accepted


def _places(result: Result) -> list[tuple[float, ...]]:
    return [(box.x1, box.y1, box.x2, box.y2) for box in result.detections.boxes]


class ScriptedOutput(BoxesOutput):
    """Replaces the model's answer with predefined boxes, to benchmark speculative decoding.

    Args:
        boxes: x, y, width and height of each box of the answer.
        before: boxes of the previous frame, used as the draft.
        max_steps: maximum number of decoding steps that fit into the context.
    """

    __slots__ = ("_at", "_guess", "_next", "_old", "_peek", "_truth")

    def __init__(self, boxes: Boxes, before: Boxes, max_steps: int) -> None:
        super().__init__(len(boxes) + 1, 0.5, max_steps)
        self._truth, self._old = _values(boxes), _values(before)
        self._guess, self._next = list(self._old), list(self._old)
        self._at = self._peek = 0

    @property
    def visible(self) -> bool:
        """Whether boxes of the vision encoder are used as the draft; always False."""
        return False

    def commit(self, sampled: Sampled) -> bool:
        """Ignore the sampled value and append the next predefined value. Return True if the answer is complete."""
        number, self._at = self._at, self._at + 1
        self._peek = number
        self._guess = list(self._next)
        if number == len(self._truth):
            return super().commit((-99.0, 0.0, 0.0))
        kind, a, b = self._truth[number]
        return super().commit((99.0, a, 0.0) if number % 3 == 0 else (a, b if kind is Phase.SIZE else 0.0, 0.0))

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return the next sample of the simulated model, or None after the last value."""
        number, self._peek = self._peek, self._peek + 1
        if number >= len(self._truth):
            return None
        first = number - number % 3
        # A model that was fed a wrong draft value samples arbitrary values until the end of the box: the draft again.
        right = number < self._at or self._guess[first:number] == self._truth[first:number]
        self._next[number] = self._truth[number] if right else self._old[number]
        return self._next[number]


Boxes = tuple[tuple[float, float, float, float], ...]


@dataclass(slots=True, frozen=True)
class ScriptedDetect(Detect):
    """Detect task whose answer is predefined, to benchmark speculative decoding.

    Attributes:
        boxes: boxes of the answer.
        before: boxes of the previous frame's answer, used as the draft.
    """

    boxes: Boxes = ()
    before: Boxes = ()

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return a state machine that generates the predefined boxes, without regard to the image."""
        return ScriptedOutput(self.boxes, self.before, max_steps)


def _values(boxes: Boxes) -> list[FedValue]:
    values: list[FedValue] = []
    for x, y, width, height in boxes:
        values += [(Phase.Y, x, 0.0), (Phase.Y, y, 0.0), (Phase.SIZE, width, height)]
    return values


def _scripted(objects: int, moved: int, frame: int) -> Boxes:
    """Return the predefined answer for a frame: `objects` boxes. The first `moved` boxes move in each frame."""
    boxes = []
    for i in range(objects):
        by = frame % 32 if i < moved else 0
        boxes.append(((60 + 800 * i // objects + 2 * by) / _BINS, (500 + by) / _BINS, 0.125, 0.25))
    return tuple(boxes)


def time_scripted(
    model: str,
    device: str,
    objects: int = 5,
    moved: Sequence[int] = (0, 2),
    *,
    dtype: str | None = None,
    size: tuple[int, int] = (640, 360),
    frames: int = 100,
) -> DraftsBench:
    """Measure the time per frame with predefined answers, without and with speculative decoding.

    Args:
        model: name, folder or Hugging Face Hub ID of a model, or `moondream-2-random`.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        objects: number of boxes per answer.
        moved: how many boxes differ from the previous frame; each number is measured separately.
        dtype: name of the dtype, or None for the device's default.
        size: width and height of the images in pixels.
        frames: number of frames per measurement.

    Raises:
        EngineError: if the model cannot be loaded.
    """
    images = images_of(str(DEMO_CLIP), *size)
    with open_engine(model, device, dtype=dtype, drafts=True) as engine:
        rows = run_scripted(engine, images, objects, moved, frames)
        info = engine.model
    return DraftsBench(info.name, info.device, info.dtype, tuple(rows))


def run_scripted(
    engine: Engine, images: Sequence[RgbImage], objects: int, moved: Sequence[int], frames: int
) -> list[ScriptedRow]:
    """Measure the time per frame with predefined answers, without and with speculative decoding."""
    rows = []
    for how_many in (None, *moved):
        key = None if how_many is None else ("bench", how_many)
        if key is not None:
            engine.configure_stream(key, _ALL)
        waits: list[float] = []
        before = 0.0
        for frame in range(frames + _WARM_UP):
            if frame == _WARM_UP:
                before = engine.counters()["steps_decode_total"]
            shown, old = (_scripted(objects, how_many or 0, one) for one in (frame, frame - 1))
            task = ScriptedDetect("person", boxes=shown, before=old)
            begun = time.perf_counter()
            engine.submit(images[frame % len(images)], [task], stream=key).result(_LONG_S)
            waits.append(1e3 * (time.perf_counter() - begun))
        steps = (engine.counters()["steps_decode_total"] - before) / frames
        p50, p99 = np.percentile(waits[_WARM_UP:], [50, 99])
        rows.append(ScriptedRow(objects, how_many, steps, float(p50), float(p99)))
    return rows
