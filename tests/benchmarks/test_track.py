from __future__ import annotations

import json

from benchmarks.track import time_tracks


def test_every_step_is_timed_for_every_number_of_objects() -> None:
    timed = time_tracks([1, 12], frames=60)
    assert [(cost.objects, cost.step) for cost in timed.costs] == [
        (count, step) for count in (1, 12) for step in ("tracker", "tracks", "zones and lines", "rules")
    ]
    assert all(0 < cost.p50_ms <= cost.p99_ms for cost in timed.costs)
    by_step = {cost.step: cost.p50_ms for cost in timed.costs if cost.objects == 12}
    assert by_step["tracker"] < by_step["rules"]  # which is all of them
    assert len(json.loads(timed.as_json())["costs"]) == 8
    assert "zones and lines" in timed.as_text()
