"""`saccade discover` on a device of our own."""

from __future__ import annotations

import json

import pytest

from saccade.pipeline.cli.commands.discover import find_cameras
from tests.support.cameras.onvif_device import answering_probes, onvif_device


def test_cameras_are_listed_with_their_profiles() -> None:
    pytest.importorskip("onvif")
    with onvif_device("rtsp://127.0.0.1:1") as port, answering_probes(port) as group:
        found = find_cameras(0.5, "bob", "secret", group)
        refused = find_cameras(0.5, "eve", "secret", group)
        unasked = find_cameras(0.5, None, None, group)
    lines = found.as_text().splitlines()
    assert lines[0] == f"onvif://127.0.0.1:{port}  Front Door, IPC-1"
    assert lines[1].startswith("   /main  H264 3840x2160, 25 fps")
    assert lines[2].startswith(" * /sub  H264 1280x720, 25 fps")
    (camera,) = json.loads(found.as_json())
    assert (camera["chosen"], len(camera["profiles"])) == ("sub", 2)
    assert "auth failed" in refused.as_text()
    assert len(unasked.as_text().splitlines()) == 1
    assert "secret" not in found.as_text() + refused.as_text() + found.as_json()


def test_an_empty_network_is_stated_to_be_one() -> None:
    with answering_probes(1) as group:
        pass
    assert "no ONVIF camera answered" in find_cameras(0.2, None, None, group).as_text()
