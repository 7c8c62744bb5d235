"""Records of an event of a rule, as sinks that take events are given them."""

from __future__ import annotations

from typing import Any

RULES: dict[str, Any] = {"schema": "saccade/event/1", "type": "rules", "stream": "door", "rules": ["no helmet", "late"]}
BEGIN: dict[str, Any] = {
    "schema": "saccade/event/1",
    "type": "begin",
    "id": "1002.000000-aaaaaa",
    "rule": "no helmet",
    "stream": "door",
    "label": "person",
    "sub_label": None,
    "tracks": [7],
    "count": 1,
    "zones": ["hall"],
    "current_zones": ["hall"],
    "entered_zones": ["hall"],
    "since": 1000.0,
    "start_time": 1002.0,
    "end_time": None,
    "frame_time": 1002.0,
    "capture_clock": "arrival",
    "score": 0.9,
    "top_score": 0.9,
    "width": 200,
    "height": 100,
    "box": [80.4, 20.0, 120.0, 80.0],
    "box_norm": [0.402, 0.2, 0.6, 0.8],
    "area": 2376,
    "speed": 0.1,
    "stationary": False,
    "p_yes": None,
    "answers": {},
    "attributes": {},
    "has_snapshot": False,
    "has_clip": False,
    "snapshot": None,
    "clip": None,
}
END = {**BEGIN, "type": "end", "end_time": 1005.0, "frame_time": 1005.0, "count": 0, "top_score": 0.97}
