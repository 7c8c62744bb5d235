"""What is done when Ray does not start. Ray itself cannot be made to fail on demand: `ray.init` fails in its place."""

from __future__ import annotations

import signal
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_ray_is_started_a_second_time_if_it_fails(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from saccade.pipeline.control.ray_cluster import _start_local

    calls: list[dict[str, Any]] = []
    hangup = signal.getsignal(signal.SIGHUP)

    def init(**options: Any) -> None:
        calls.append(options)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        if len(calls) <= failures:
            raise RuntimeError("Failed to start GCS.\nsee the logs")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if failures == 2:
        with pytest.raises(RuntimeError, match="Failed to start GCS"):
            _start_local(3, {"log_to_driver": False})
    else:
        _start_local(3, {"log_to_driver": False})
    assert [call["num_cpus"] for call in calls] == [3] * min(2, failures + 1)
    assert signal.getsignal(signal.SIGHUP) is hangup
    assert [record.message for record in caplog.records] == [
        "Ray did not start: Failed to start GCS. see the logs; retrying"
    ] * min(1, failures)
