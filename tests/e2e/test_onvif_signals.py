"""What an ONVIF camera reports, as the condition of a rule and as a gate, in a run with a virtual camera."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.config.file import load
from saccade.pipeline.run import opened_run
from tests.support.cameras import Camera, need_servers, wait_for
from tests.support.cameras.onvif_device import MediaProfile, OnvifCamera, serving_camera

pytestmark = pytest.mark.e2e
pytest.importorskip("onvif")

LONG_S = 120  # far beyond what any of these needs; only so that a hang fails
MOTION = "VideoSource/MotionAlarm", "v1", "State"


def test_motion_that_the_camera_reports_makes_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_servers()
    monkeypatch.chdir(tmp_path)
    heard: list[dict[str, Any]] = []
    with Camera("--fps", "10") as camera:
        stream = camera.url("live").rpartition("/")[0]
        device = OnvifCamera(stream, [MediaProfile("live", 1280, 720)], events=True, signals={MOTION: False})
        with serving_camera(device) as port:
            values = {
                "name": "yard",
                "source": f"onvif://bob:secret@127.0.0.1:{port}",
                "detect": ["person"],
                "rules": ["moves=camera reports motion"],
                "gates": ["camera"],
                "motion_heartbeat": 2,
                "clip_after": 1,
                "store": "kept",
            }
            with opened_run(load(None, values)) as opened:
                opened.controller.local.events.hub.add(lambda event: heard.append(dict(event)))
                (run,) = opened.controller.start()
                wait_for(lambda: run.report().drops.get("gate", 0) > 20, LONG_S)  # nothing moves
                device.report(*MOTION, active=True)
                wait_for(lambda: any(one["type"] == "begin" for one in heard), LONG_S)
                device.report(*MOTION, active=False)
                wait_for(lambda: any(one["type"] == "end" for one in heard), LONG_S)
    events = [one for one in heard if one["type"] in ("begin", "end")]
    assert [(one["type"], one["rule"], one["stream"]) for one in events] == [
        ("begin", "moves", "yard"),
        ("end", "moves", "yard"),
    ]
    assert events[0]["id"] == events[1]["id"]
    assert events[0]["snapshot"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rules": ["moves=camera reports motion"]}, "rule 'moves': only a source onvif://user:password@HOST reports"),
        ({"gates": ["camera"]}, "gates: the gate 'camera' needs an ONVIF source, onvif://user:password@HOST"),
    ],
)
def test_another_camera_reports_nothing(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):  # noqa: SIM117
        with opened_run(load(None, {"source": "rtsp://127.0.0.1:1/x", "detect": ["person"], **values})):
            pass
