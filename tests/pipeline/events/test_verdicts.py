"""Finds that resemble a false alarm are held back; others pass."""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.geometry import Rect
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.events.record import Change, EventLook, make_history_record
from saccade.pipeline.events.settings import EventSettings
from saccade.pipeline.events.stage import EventStage
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.verdicts import MOST_VERDICTS, HeldBack, Verdict, VerdictStage
from saccade.sinks.record import Latency, make_record
from saccade.sources import Frame
from tests.pipeline.events.storage.test_store import event
from tests.support.sinks.results import live_frame

BUSH = (0.1, 0.2, 0.3, 0.8)
LOOK = np.array([1, 0], np.float32)
OTHER = np.array([0.6, 0.8], np.float32)
VERDICT = Verdict("e1", "yard", "person", 0.8, BUSH, LOOK.astype(np.float16).tobytes())


def frame_of(stream: str) -> Frame:
    return Frame(np.zeros((9, 16, 3), np.uint8), stream, 0, 0, Fraction(1, 90_000), 0.0, "arrival", 0.0, 5.0)


def passes(box: Box, look: NDArray[np.float32] | None, *verdicts: Verdict) -> bool:
    def describe(image: NDArray[np.uint8], place: Rect) -> NDArray[np.float32]:
        assert look is not None
        return look

    stage = VerdictStage(describe if look is not None else None, {"yard": verdicts})
    found = stage.process(frame_of("yard"), Result(Detections((box,), 16, 9), Points((), 16, 9)))
    held = sum(stage.held_back.values())
    assert len(found.extras.get(HeldBack.key, ())) == held
    assert held + len(found.detections.boxes) == 1
    return not held


@pytest.mark.parametrize(
    ("box", "look", "expected"),
    [
        (Box("person", 0.8, *BUSH), LOOK, False),
        (Box("person", 0.3, *BUSH), LOOK, False),
        (Box("person", 0.89, *BUSH), LOOK, False),
        (Box("person", 0.91, *BUSH), LOOK, True),  # clearly higher
        (Box("person", 0.8, *BUSH), OTHER, True),  # looks different
        (Box("person", 0.8, *BUSH), None, False),  # a model without features: place and size only
        (Box("car", 0.8, *BUSH), LOOK, True),
        (Box("person", 0.8, 0.12, 0.22, 0.3, 0.8), LOOK, False),
        (Box("person", 0.8, 0.25, 0.2, 0.45, 0.8), LOOK, True),  # beside it
        (Box("person", 0.8, 0.1, 0.2, 0.2, 0.4), LOOK, True),  # smaller
    ],
)
def test_only_what_looks_and_lies_alike_is_held_back(
    box: Box, look: NDArray[np.float32] | None, expected: bool
) -> None:
    assert passes(box, look, VERDICT) is expected
    assert passes(box, look)


def test_records_list_what_is_held_back() -> None:
    bush, bike = Box("person", 0.81234, *BUSH), Box("bike", 0.8, *BUSH)
    result = Result(Detections((bush, bike), 16, 9), Points((), 16, 9))
    found = VerdictStage(None, {"yard": [VERDICT]}).process(frame_of("yard"), result)
    record = make_record(frame_of("yard"), found, Latency())
    assert [one["label"] for one in record["objects"]] == ["bike"]
    box = {"box": [1.6, 1.8, 4.8, 7.2], "box_norm": list(BUSH)}
    assert record["held_back"] == [{"event": "e1", "label": "person", "score": 0.812, **box}]


def test_other_verdicts_apply_from_the_next_frame_on() -> None:
    verdicts: dict[str, list[Verdict]] = {}
    stage = VerdictStage(None, verdicts)
    result = Result(Detections((Box("person", 0.8, *BUSH),), 16, 9), Points((), 16, 9))

    def held(stream: str) -> bool:
        return not stage.process(frame_of(stream), result).detections.boxes

    assert not held("yard")
    verdicts["yard"] = [VERDICT]
    assert (held("yard"), held("hall"), held("yard")) == (True, False, True)
    verdicts["yard"] = []
    assert not held("yard")
    assert stage.held_back == {"e1": 2}


def test_the_store_keeps_and_removes_verdicts(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        store.write(event(1, stream="yard", box_norm=list(BUSH)))
        store.write(make_history_record(EventLook("yard", "e1", b"\x00<")))
        store.flush()
        assert store.judge("e1", false_alarm=True) == store.judge("e1", false_alarm=True) == "yard"
        assert [(one.event, one.look) for one in store.verdicts("yard")] == [("e1", b"\x00<")]
        assert store.verdicts("hall") == []
        assert store.judge("e9", false_alarm=True) is None
        for _ in range(2):
            store.keep_verdict(VERDICT)  # of another store
        assert len(store.verdicts()) == 1
        store.delete("e1")
    with closing(EventStore(tmp_path)) as store:
        assert len(store.verdicts()) == 1  # survives its event and a restart
        assert store.judge("e1", false_alarm=False) == "yard"
        assert store.verdicts() == []


def test_a_verdict_takes_the_box_from_the_frame_of_the_look(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        store.write(event(1, "begin", stream="yard", score=0.8, top_score=0.8, box_norm=list(BUSH)))
        store.write(make_history_record(EventLook("yard", "e1", b"\x00<")))
        elsewhere = [0.6, 0.2, 0.8, 0.8]
        for kind in ("update", "end"):
            store.write(event(1, kind, stream="yard", label="dog", score=0.5, top_score=0.97, box_norm=elsewhere))
        assert store.judge("e1", false_alarm=True) == "yard"
        assert store.verdicts() == [Verdict("e1", "yard", "person", 0.97, BUSH, b"\x00<")]


def test_a_suppressed_detection_does_not_carry_a_lost_track_over_for() -> None:
    """Neither while the track is lost, nor when the object is detected again with a higher score."""
    heard: list[object] = []
    verdicts: dict[str, list[Verdict]] = {}
    zone = {"zones": {"left": "0,0,0.5,0,0.5,1,0,1"}}
    stages = (
        VerdictStage(None, verdicts),
        AnalyzeStage(AnalyticsSettings.model_validate(zone), track=True),
        EventStage(EventSettings.model_validate({"rules": ["visitor=person in left for 2s"]}).rules, heard.append),
    )
    for number in range(55):
        verdicts["door"] = [VERDICT] if 15 <= number < 23 or number >= 36 else []
        result = Result(Detections((Box("person", 0.8, *BUSH),), 200, 100), Points((), 200, 100))
        for stage in stages:
            result = stage.process(live_frame(number / 10, "door"), result)
    assert [one for one in heard if isinstance(one, Change)] == []


def test_the_oldest_verdict_of_a_stream_goes(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        for number in range(MOST_VERDICTS + 1):
            store.write(event(number, stream="yard", box_norm=list(BUSH)))
            store.judge(f"e{number}", false_alarm=True)
        store.write(event(99, stream="hall", box_norm=list(BUSH)))
        store.judge("e99", false_alarm=True)
        assert [one.event for one in store.verdicts("yard")] == [f"e{n}" for n in range(1, MOST_VERDICTS + 1)]
        assert len(store.verdicts("hall")) == 1
