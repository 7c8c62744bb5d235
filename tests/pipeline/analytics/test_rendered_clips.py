"""Rendered clips of which everything is known: what is counted from their pixels, whole and after losing frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.sources import Frame, open_source

WIDTH, HEIGHT, FPS, SECONDS = 320, 180, 25, 8
LINE_X, ZONE = 0.5, (0.6, 0.9)
"""The line is upright, its forward to the right; the zone reaches from top to bottom between two x."""


@dataclass(frozen=True)
class Walk:
    """A bright block that walks at a height from one x to another between two times, in seconds; then it is gone."""

    y: float
    start: float
    end: float
    begin_s: float
    end_s: float

    def x(self, t: float) -> float | None:
        if not self.begin_s <= t <= self.end_s:
            return None
        return self.start + (self.end - self.start) * (t - self.begin_s) / (self.end_s - self.begin_s)


WALKS = (
    Walk(0.10, 0.1, 0.75, 0.4, 5.0),  # forward, and stands no time in the zone
    Walk(0.30, 0.9, 0.2, 1.0, 6.0),  # from the zone's right edge through it and out, backward
    Walk(0.50, 0.1, 0.45, 0.0, 7.0),  # up to the line and not over it
    Walk(0.70, 0.2, 0.98, 2.0, 7.0),  # forward, in and out
    Walk(0.90, 0.95, 0.55, 3.0, 6.5),  # in and out, and stops before the line
)


def blocks_at(t: float) -> list[tuple[float, float]]:
    return [(x, walk.y) for walk in WALKS if (x := walk.x(t)) is not None]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rendered") / "walks.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS), options={"crf": "18", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(FPS * SECONDS):
            image = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
            for x, y in blocks_at(number / FPS):
                left, top = round(x * WIDTH) - 8, round(y * HEIGHT) - 6
                image[max(top, 0) : top + 12, max(left, 0) : left + 16] = 230
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path


def found_in(image: np.ndarray) -> Result:
    """What is bright, as boxes."""
    _, _, boxes, _ = cv2.connectedComponentsWithStats((image[..., 1] > 130).astype(np.uint8))
    corners = [(x / WIDTH, y / HEIGHT, (x + w) / WIDTH, (y + h) / HEIGHT) for x, y, w, h, _ in boxes[1:].tolist()]
    return Result(
        Detections(tuple(Box("block", 0.9, *box) for box in corners), WIDTH, HEIGHT), Points((), WIDTH, HEIGHT)
    )


@cache
def seen_in(path: Path) -> list[tuple[Frame, Result]]:
    with open_source(path) as source:
        return [(frame, found_in(frame.image)) for frame in source]


def analyze(seen: Sequence[tuple[Frame, Result]]) -> AnalyzeStage:
    left, right = ZONE
    zone = {"polygon": f"{left},0,{right},0,{right},1,{left},1", "anchor": "center"}
    line = {"points": f"{LINE_X},1,{LINE_X},0", "anchor": "center"}
    stage = AnalyzeStage(AnalyticsSettings.model_validate({"zones": {"shop": zone}, "lines": {"gate": line}}))
    for frame, result in seen:
        stage.process(frame, result)
    return stage


def counted(stage: AnalyzeStage) -> tuple[int, dict[str, int], dict[str, int]]:
    totals = stage.totals()
    return totals.objects["block"], dict(totals.lines["gate"]["block"]), dict(totals.zones["shop"]["block"])


TRUTH = 5, {"forward": 2, "backward": 1}, {"inside": 0, "entered": 4, "left": 4}


def test_counts_of_a_rendered_clip_are_exact(clip: Path) -> None:
    assert counted(analyze(seen_in(clip))) == TRUTH


@pytest.mark.parametrize("seed", range(10))
def test_losing_half_of_the_frames_changes_no_count(clip: Path, seed: int) -> None:
    kept = np.random.default_rng(seed).random(FPS * SECONDS) < 0.5
    seen = [one for one in seen_in(clip) if kept[one[0].index]]
    assert 0.35 < len(seen) / (FPS * SECONDS) < 0.65
    assert counted(analyze(seen)) == TRUTH


def test_dwell_is_true_within_a_frame(clip: Path) -> None:
    stage = analyze(seen_in(clip))
    times = np.arange(FPS * SECONDS) / FPS
    inside = [[t for t in times if (x := walk.x(t)) is not None and ZONE[0] <= x <= ZONE[1]] for walk in WALKS]
    true = sorted(own[-1] - own[0] for own in inside if own)
    assert sorted(stage._zones["shop"].dwells) == pytest.approx(true, abs=1.01 / FPS)
