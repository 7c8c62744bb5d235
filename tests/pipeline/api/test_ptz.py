"""PTZ presets over HTTP, of a virtual ONVIF camera."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from saccade.pipeline.api.http_server import serve
from saccade.pipeline.config import StreamConfig
from saccade.pipeline.runtime.streams import Streams
from tests.pipeline.api.test_http_server import ask, error_of
from tests.support.cameras import free_port
from tests.support.cameras.onvif_device import MediaProfile, OnvifCamera, serving_camera
from tests.support.control import controller_of

pytest.importorskip("onvif")


@pytest.fixture
def served(streams: Streams) -> Iterator[tuple[Any, OnvifCamera]]:
    """A server with the streams `door` and `fixed` of ONVIF cameras, `away` of one that is off, and `other`."""
    turning = OnvifCamera(profiles=[MediaProfile("main", 1280, 720, ptz=True)], presets={"1": "Gate", "a/b": "Yard"})
    with serving_camera(turning) as door, serving_camera(OnvifCamera()) as fixed:
        controller = controller_of(streams)
        server = serve(controller, port=0)
        addresses = {
            "door": f"onvif://bob:secret@127.0.0.1:{door}",
            "fixed": f"onvif://bob:secret@127.0.0.1:{fixed}",
            "away": f"onvif://bob:secret@127.0.0.1:{free_port()}",
            "other": "rtsp://127.0.0.1:1/x",
        }
        for name, source in addresses.items():
            controller.add(StreamConfig(name=name, source=source, detect=["person"]))
        yield server, turning
        server.close()


def test_a_camera_is_turned_over_http(served: tuple[Any, OnvifCamera]) -> None:
    server, camera = served
    answer = ask(server, "GET", "/streams/door/ptz/presets")
    assert (answer.status, answer.json) == (
        200,
        {"presets": [{"token": "1", "name": "Gate"}, {"token": "a/b", "name": "Yard"}]},
    )
    assert ask(server, "POST", "/streams/door/ptz/presets/a%2Fb").status == 204
    assert camera.position == "a/b"
    camera.locked = True
    answer = ask(server, "POST", "/streams/door/ptz/presets/1")
    assert answer.status == 502
    assert "a person turns the camera" in error_of(answer)
    assert "secret" not in error_of(answer)
    assert camera.position == "a/b"


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("door/ptz/presets/7", 404, "PTZ preset '7' does not exist; available: 1, a/b"),
        ("fixed/ptz/presets/1", 404, "the camera does not support PTZ"),
        ("away/ptz/presets/1", 502, "127.0.0.1"),
        ("other/ptz/presets/1", 409, "'other' is not an ONVIF stream: its source should be onvif://user:password@HOST"),
        ("nowhere/ptz/presets/1", 404, "stream 'nowhere' does not exist"),
    ],
)
def test_why_a_camera_is_not_turned(served: tuple[Any, OnvifCamera], path: str, status: int, error: str) -> None:
    server, camera = served
    answer = ask(server, "POST", f"/streams/{path}")
    assert answer.status in (502, 504) if status == 502 else answer.status == status, answer
    assert error in error_of(answer)
    assert "secret" not in error_of(answer)
    assert camera.position == ""


def test_the_schema_describes_the_routes(served: tuple[Any, OnvifCamera]) -> None:
    paths = ask(served[0], "GET", "/openapi.json").json["paths"]
    assert paths["/streams/{name}/ptz/presets"]["get"]["x-role"] == "operator"
    assert paths["/streams/{name}/ptz/presets/{preset}"]["post"]["x-role"] == "operator"
