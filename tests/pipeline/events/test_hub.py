"""The hub of events where something that takes them hangs."""

from __future__ import annotations

import threading

import pytest

from saccade.pipeline.events import hub
from saccade.pipeline.events.record import RuleList


def test_a_listener_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_WAITING", 4)
    monkeypatch.setattr(hub, "FLUSH_S", 0.05)
    events, go_on = hub.EventHub(), threading.Event()
    events.add(lambda record: bool(go_on.wait()))
    for _ in range(8):
        events.publish(RuleList("door", ()))
    ending = threading.Thread(target=events.close, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
    assert events.dropped >= 3
    [working] = [thread for thread in threading.enumerate() if thread.name == "saccade events"]
    go_on.set()
    working.join(20)
    assert not working.is_alive()
