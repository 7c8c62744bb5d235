from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.questions import time_questions
from saccade.engine import EngineError
from tests.support.engine import TINY, random_model, write_model


def test_questions_are_asked_beside_the_same_cameras(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY, random_model(TINY))
    timed = time_questions(str(folder), "cpu", 4, (2, 3), 5, seconds=1, deadline_ms=None, objects=1, size=(64, 48))
    assert timed.asked > 0
    assert timed.failed == 0
    assert timed.late == timed.asked or 0 < timed.p50_ms <= timed.p95_ms
    assert timed.without.offered_fps == timed.beside.offered_fps > 0
    assert f"{timed.asked} questions" in timed.as_text()
    assert json.loads(timed.as_json())["asked"] == timed.asked
    with pytest.raises(EngineError, match="nano does not answer questions"):
        time_questions("nano", "cpu", 4, (5, 10), 8)
