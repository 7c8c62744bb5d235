"""The demo clip, counted by hand, against what is counted from nano's boxes of it: whole, in halves, through the gate.

One person stands at a table from the beginning on and leaves to the right at 4 s; another comes at 8 s and stays there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.counts import Totals
from saccade.pipeline.analytics.motion import MotionGate
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.core.assets import DEMO_CLIP
from saccade.sources import Frame, open_source
from tests.support.sinks.results import live_frame

SEEN = json.loads((Path(__file__).parent / "data" / "one_by_one.json").read_text())
SETTINGS = AnalyticsSettings.model_validate(
    {"zones": "table=.4,.5,.75,.5,.75,1,.4,1", "lines": ["right=.78,1,.78,0", "left=.1,1,.1,0"]}
)
TRUTH = Totals(
    {"person": 2},
    {"table": {"person": {"inside": 1, "entered": 2, "left": 1}}},
    {"right": {"person": {"forward": 1, "backward": 0}}, "left": {}},
)


def frames() -> list[Frame]:
    return [replace(live_frame(seconds), index=number) for number, (seconds, _) in enumerate(SEEN)]


def analyze(shown: Iterable[Frame], stage: AnalyzeStage) -> AnalyzeStage:
    for frame in shown:
        boxes = tuple(Box("person", box[4], *box[:4]) for box in SEEN[frame.index][1])
        stage.process(frame, Result(Detections(boxes, 640, 360), Points((), 640, 360)))
    return stage


def test_all_frames_give_the_true_counts() -> None:
    stage = analyze(frames(), AnalyzeStage(SETTINGS))
    assert stage.totals() == TRUTH


@pytest.mark.parametrize("seed", range(20))
def test_half_of_the_frames_give_the_true_counts(seed: int) -> None:
    kept = np.random.default_rng(seed).random(len(SEEN)) < 0.5
    assert analyze([frame for frame in frames() if kept[frame.index]], AnalyzeStage(SETTINGS)).totals() == TRUTH


def test_the_motion_gate_saves_frames_and_loses_no_event() -> None:
    gate = MotionGate(SETTINGS)
    with open_source(DEMO_CLIP) as source:
        shown = [frame for frame in source if gate.admit(frame)]
    assert len(shown) < 0.8 * len(SEEN)
    assert analyze(shown, AnalyzeStage(SETTINGS, gate.still_before)).totals() == TRUTH
