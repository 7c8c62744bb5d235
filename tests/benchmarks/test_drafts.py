from __future__ import annotations

import pytest

from benchmarks.drafts import ClipRow, ScriptedRow, time_drafts, time_scripted
from benchmarks.flags import parse_small
from saccade.pipeline.errors import ConfigError
from tests.support import REPO

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"


def test_a_clip_takes_fewer_steps_and_has_the_same_boxes() -> None:
    timed = time_drafts("nano", "cpu", [str(CLIP)], frames=15)
    (row,) = timed.rows
    assert isinstance(row, ClipRow)
    assert (row.clip, row.frames, row.differ) == ("demo", 15, 0)
    assert 0 <= row.drafted < row.plain  # on some processors what the detector has found is right to the last bit
    assert 0 < row.accepted <= 1
    assert "demo" in timed.as_text()


def test_scripted_answers_take_the_steps_that_the_script_says() -> None:
    """What has not moved is right at once; a place is right when x was, and a size when both were."""
    timed = time_scripted("nano", "cpu", 3, (0, 1, 3), frames=3)
    steps = {}
    for row in timed.rows:
        assert isinstance(row, ScriptedRow)
        steps[row.moved] = row.steps
    assert steps == {None: 9, 0: 0, 1: 2, 3: 2}
    assert "no draft" in timed.as_text()


@pytest.mark.parametrize("text", ["", "6", "1,,2", "x"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 0,2"):
        parse_small(text, "--moved", 5)
