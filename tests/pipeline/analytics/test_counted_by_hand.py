"""Two clips, counted by hand, against what is counted from nano's boxes of them: whole, in halves, through the gate.

One by one: one person stands at a table from the beginning on and leaves to the right at 4 s; another comes at 8 s and
stays there. Bottles: three stand on a table; the left one is lifted out of the image at 4 s and put back at 9 s, it and
the middle one are lifted out at 14.6 s. (`bottle-detection.mp4` of intel-iot-devkit/sample-videos, cut to 16 s at 30
fps, 640×360; only boxes of nano's that score 0.7 or more: below it, half a bottle or a hand is one as well.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.counts import Totals
from saccade.pipeline.analytics.motion import MotionGate
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.sources import Frame, open_source
from tests.support.sinks.results import live_frame

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Counted:
    """A clip: what is looked for, where it is counted, and what is true."""

    file: str
    label: str
    settings: AnalyticsSettings
    truth: Totals

    @cached_property
    def seen(self) -> list[tuple[float, list[list[float]]]]:
        """Seconds and boxes (x1, y1, x2, y2, score) of each frame."""
        return json.loads((DATA / self.file).read_text())

    def frames(self) -> list[Frame]:
        return [replace(live_frame(seconds), index=number) for number, (seconds, _) in enumerate(self.seen)]

    def analyze(self, shown: Iterable[Frame], stage: AnalyzeStage) -> Totals:
        for frame in shown:
            boxes = tuple(Box(self.label, box[4], *box[:4]) for box in self.seen[frame.index][1])
            stage.process(frame, Result(Detections(boxes, 640, 360), Points((), 640, 360)))
        return stage.totals()


PEOPLE = Counted(
    "one_by_one.json",
    "person",
    AnalyticsSettings.model_validate(
        {"zones": "table=.4,.5,.75,.5,.75,1,.4,1", "lines": ["right=.78,1,.78,0", "left=.1,1,.1,0"]}
    ),
    Totals(
        {"person": 2},
        {"table": {"person": {"inside": 1, "entered": 2, "left": 1}}},
        {"right": {"person": {"forward": 1, "backward": 0}}, "left": {}},
    ),
)
BOTTLES = Counted(
    "bottles.json",
    "bottle",
    AnalyticsSettings.model_validate({"zones": "table=0,.75,1,.75,1,1,0,1", "lines": ["edge=0,.75,1,.75"]}),
    Totals(
        {"bottle": 4},
        {"table": {"bottle": {"inside": 1, "entered": 4, "left": 3}}},
        {"edge": {"bottle": {"forward": 1, "backward": 3}}},
    ),
)


@pytest.mark.parametrize("clip", [PEOPLE, BOTTLES], ids=lambda clip: clip.label)
def test_all_frames_give_the_true_counts(clip: Counted) -> None:
    assert clip.analyze(clip.frames(), AnalyzeStage(clip.settings)) == clip.truth


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("clip", [PEOPLE, BOTTLES], ids=lambda clip: clip.label)
def test_half_of_the_frames_give_the_true_counts(clip: Counted, seed: int) -> None:
    kept = np.random.default_rng(seed).random(len(clip.seen)) < 0.5
    shown = [frame for frame in clip.frames() if kept[frame.index]]
    assert clip.analyze(shown, AnalyzeStage(clip.settings)) == clip.truth


def test_the_motion_gate_saves_frames_and_loses_no_event() -> None:
    gate = MotionGate(PEOPLE.settings)
    with open_source(DEMO_CLIP) as source:
        shown = [frame for frame in source if gate.admit(frame)]
    assert len(shown) < 0.8 * len(PEOPLE.seen)
    assert PEOPLE.analyze(shown, AnalyzeStage(PEOPLE.settings, gate.still_before)) == PEOPLE.truth
