"""ONVIF devices: found on the network, asked for profiles, and opened as sources."""

from __future__ import annotations

import subprocess
import sys
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources import LiveError, SourceError, open_source, redact
from saccade.sources.onvif import (
    OnvifAddress,
    OnvifSource,
    Profile,
    PtzError,
    best_profile,
    discover,
    largest_profile,
    read_profiles,
)
from saccade.sources.onvif.discovery import parse_matches
from tests.sources.rtsp.test_faults import numbers, take
from tests.support import REPO
from tests.support.cameras import LONG_S, wait_for
from tests.support.cameras.onvif_device import (
    MATCH,
    MediaProfile,
    OnvifCamera,
    answering_probes,
    onvif_device,
    serving_camera,
)
from tests.support.cameras.scripted import Packetizer, ScriptedCamera, coded_frames

pytest.importorskip("onvif")


def test_devices_that_answer_a_probe_are_found() -> None:
    with answering_probes(8899) as group:
        (device,) = discover(0.5, group)
    assert (device.host, device.port, device.name, device.hardware) == ("127.0.0.1", 8899, "Front Door", "IPC-1")


ANSWER = MATCH.replace("{port}", "8899").encode()


@st.composite
def damaged_answers(draw: st.DrawFn) -> bytes:
    """A good answer with a part replaced: bytes anywhere, or the text of an element, so that it stays XML."""
    if draw(st.booleans()):
        begin = draw(st.integers(0, len(ANSWER)))
        end = draw(st.integers(begin, min(len(ANSWER), begin + 40)))
        return ANSWER[:begin] + draw(st.binary(max_size=40)) + ANSWER[end:]
    address = st.one_of(
        st.text(max_size=30),
        st.builds("http://{}:{}/x".format, st.sampled_from(["127.0.0.1", "[::1]", "[::1", "", "a.b"]), st.integers()),
        st.builds("{}://127.0.0.1{}".format, st.sampled_from(["https", "rtsp", ""]), st.text(max_size=10)),
    )
    texts = draw(st.lists(address, max_size=4)), draw(st.lists(st.text(max_size=90), max_size=4))
    xaddrs, scopes = (escape(" ".join(one)) for one in texts)
    text = ANSWER.decode().replace("http://127.0.0.1:8899/onvif/device_service", xaddrs)
    return text.replace("onvif://www.onvif.org/name/Front%20Door", scopes).encode("utf-8", "surrogatepass")


@given(damaged_answers())
def test_no_answer_raises_and_what_is_found_could_be_a_device(data: bytes) -> None:
    for device in parse_matches(data, "127.0.0.1"):
        assert device.host
        assert not set(device.host) & set(" /?#")
        assert 0 < device.port < 65536
        assert (device.name + device.hardware).isprintable()
    assert parse_matches(data.replace(b"<e:Envelope", b"<!DOCTYPE x><e:Envelope"), "127.0.0.1") == [] or (
        b"<e:Envelope" not in data
    )


def test_entities_are_not_expanded() -> None:
    assert parse_matches(ANSWER, "127.0.0.1")
    bomb = ANSWER.replace(b"<e:Envelope", b'<!DOCTYPE x [<!ENTITY a "aaaa">]><e:Envelope')
    assert parse_matches(bomb, "127.0.0.1") == []


def test_profiles_are_read_and_the_nearest_is_chosen() -> None:
    with onvif_device("rtsp://127.0.0.1:1") as port:
        profiles = read_profiles(OnvifAddress.parse(f"onvif://bob:secret@127.0.0.1:{port}"))
    main, sub = profiles
    assert (main.token, main.codec, main.width, main.height, main.fps, main.key_interval) == (
        "main", "H264", 3840, 2160, 25.0, 50,
    )  # fmt: skip
    assert sub.uri == "rtsp://127.0.0.1:1/sub"
    assert best_profile(profiles) is sub
    assert largest_profile(profiles) is main


def test_a_codec_that_is_not_decoded_here_is_the_last_choice() -> None:
    jpeg = Profile("a", "a", "JPEG", 1280, 720, None, None, "rtsp://x")
    tiny = Profile("b", "b", "H265", 320, 240, None, None, "rtsp://x")
    assert best_profile([jpeg, tiny]) is tiny
    assert best_profile([jpeg]) is jpeg
    assert largest_profile([jpeg, tiny]) is tiny


TOGETHER = """
import sys, threading
from saccade.sources.onvif import OnvifAddress, read_profiles
address = OnvifAddress.parse(sys.argv[1])
found = []
threads = [threading.Thread(target=lambda: found.append(len(read_profiles(address)))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*found)
"""


def test_streams_that_open_at_the_same_time_do_not_wait_for_each_other() -> None:
    with onvif_device("rtsp://127.0.0.1:1") as port:  # in a process that has not asked any device yet
        command = [sys.executable, "-c", TOGETHER, f"onvif://bob:secret@127.0.0.1:{port}"]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.stdout.split()) == ("", ["2"] * 4)


@pytest.mark.parametrize("media2", [True, False, "broken"])
def test_profiles_of_h265_are_read_from_media2(media2: bool | str) -> None:
    camera = OnvifCamera(
        "rtsp://127.0.0.1:1",
        [MediaProfile("main & more", 3840, 2160, "H265"), MediaProfile("sub", 1280, 720)],
        media2=media2,
    )
    with serving_camera(camera) as port:
        profiles = read_profiles(OnvifAddress.parse(f"onvif://bob:secret@127.0.0.1:{port}"))
    if media2 is not True:  # the service Media lists H.264 only
        assert [profile.token for profile in profiles] == ["sub"]
        assert ("media2/GetProfiles" in camera.asked) == bool(media2)
        return
    main, sub = profiles
    assert (main.name, main.token, main.codec, main.width, main.height, main.fps, main.key_interval) == (
        "main & more", "main & more", "H265", 3840, 2160, 25.0, 50,
    )  # fmt: skip
    assert main.uri == "rtsp://127.0.0.1:1/main & more"
    assert (best_profile(profiles), largest_profile(profiles)) == (sub, main)
    assert not [request for request in camera.asked if request.startswith("media/")]


def test_a_password_that_media2_refuses_is_named() -> None:
    with serving_camera(OnvifCamera(media2=True)) as port, pytest.raises(LiveError) as caught:
        read_profiles(OnvifAddress.parse(f"onvif://bob:wrong@127.0.0.1:{port}"))
    assert caught.value.reason == "auth failed"


@pytest.mark.parametrize(
    ("token", "largest", "path", "line"),
    [
        ("", False, "sub", "stream door: uses ONVIF profile 'sub' (H264 1280x720) for analysis"),
        ("", True, "main", "stream door: uses ONVIF profile 'main' (H264 3840x2160) for recordings"),
        ("/main", False, "main", "stream door: uses ONVIF profile 'main' (H264 3840x2160) for analysis"),
    ],
)
def test_an_onvif_address_is_opened_as_a_source(
    token: str, largest: bool, path: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "saccade")
    frames = coded_frames(20)
    with (
        ScriptedCamera(lambda call: call.play(frames, Packetizer(), 0.02)) as camera,
        onvif_device(f"rtsp://127.0.0.1:{camera.port}") as port,
    ):
        address = f"onvif://bob:secret@127.0.0.1:{port}{token}"
        source = open_source(address, stream="door", hwaccel="none", largest=largest)
        assert numbers(take(source, 5)) == list(range(5))  # type: ignore[arg-type]
        assert source.info.url == f"onvif://127.0.0.1:{port}{token}"
        assert camera.calls[0].requests[0].url.endswith(f"/{path}")
    assert [one for one in caplog.messages if "ONVIF" in one] == [line]
    assert "secret" not in caplog.text


def test_a_refused_password_and_an_absent_device_are_named() -> None:
    with onvif_device("rtsp://127.0.0.1:1") as port, pytest.raises(LiveError) as caught:
        take(open_source(f"onvif://eve:secret@127.0.0.1:{port}", retry=False), 1)  # type: ignore[arg-type]
    assert caught.value.reason == "auth failed"
    assert caught.value.refused
    with pytest.raises(LiveError) as caught:
        take(open_source(f"onvif://eve:secret@127.0.0.1:{port}", retry=False), 1)  # type: ignore[arg-type]
    assert caught.value.reason in ("timeout", "connection failed")
    assert "secret" not in str(caught.value)


def test_a_malformed_onvif_address_is_refused_in_one_line() -> None:
    with pytest.raises(SourceError, match="is not an ONVIF address") as caught:
        open_source("onvif://bob:secret@a..b")
    assert "secret" not in str(caught.value)
    assert redact("onvif://bob:secret@cam") == "onvif://cam"


PRESETS = {"1": "Gate", "p/2": "Car park & yard"}


@pytest.mark.parametrize("media2", [True, False])
def test_a_camera_is_turned_to_a_preset_of_its_own(media2: bool) -> None:
    profiles = [MediaProfile("fixed", 3840, 2160), MediaProfile("turns", 1280, 720, ptz=True)]
    camera = OnvifCamera(profiles=profiles, presets=PRESETS, media2=media2)
    with serving_camera(camera) as port, open_source(f"onvif://bob:secret@127.0.0.1:{port}") as source:
        assert isinstance(source, OnvifSource)
        assert {one.token: one.name for one in source.presets()} == PRESETS
        source.go_to("p/2")
        assert camera.position == "p/2"
        with pytest.raises(PtzError, match=r"^PTZ preset '3' does not exist; available: 1, p/2$"):
            source.go_to("3")
        camera.locked = True
        with pytest.raises(LiveError, match="a person turns the camera"):
            source.go_to("1")
        assert camera.position == "p/2"


@pytest.mark.parametrize("presets", [None, PRESETS])
def test_a_camera_without_ptz_is_named(presets: dict[str, str] | None) -> None:
    camera = OnvifCamera(presets=presets)  # no profile can turn it
    with serving_camera(camera) as port, open_source(f"onvif://bob:secret@127.0.0.1:{port}") as source:
        assert isinstance(source, OnvifSource)
        with pytest.raises(PtzError, match=r"^the camera does not support PTZ$"):
            source.presets()


MOTION = "RuleEngine/CellMotionDetector/Motion", "v1", "IsMotion"
INPUT = "Device/Trigger/DigitalInput", "DIN_1", "LogicalState"


def until_signals(source: OnvifSource, wanted: set[str] | None) -> None:
    wait_for(lambda: source.signals() == wanted, LONG_S)


def test_the_signals_of_a_camera_are_followed() -> None:
    camera = OnvifCamera(events=True, signals={MOTION: True})  # motion goes on when Saccade subscribes
    with serving_camera(camera) as port, open_source(f"onvif://bob:secret@127.0.0.1:{port}") as source:
        assert isinstance(source, OnvifSource)
        assert source.signals() is None
        until_signals(source, {"motion", "motion v1"})
        camera.report(*INPUT, active=True)
        until_signals(source, {"motion", "motion v1", "input", "input DIN_1"})
        camera.report("VideoSource/ImageTooDark/ImagingService", "v1", "State", active=True)  # another topic
        camera.report(*MOTION, active=False)
        until_signals(source, {"input", "input DIN_1"})
        camera.report(*INPUT, active=False)
        until_signals(source, set())
        camera.report(*MOTION, active=True)
        camera.report(*MOTION, active=False)  # shorter than the time between two frames
        until_signals(source, {"motion", "motion v1"})
        until_signals(source, set())
        source.close()
        wait_for(lambda: "events/Unsubscribe" in camera.asked, LONG_S)


def test_a_camera_without_events_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.sources.onvif.signals._RETRY_S", (0.05, 0.1))
    camera = OnvifCamera()
    address = "onvif://bob:secret@127.0.0.1"
    with serving_camera(camera) as port, open_source(f"{address}:{port}", stream="door") as source:
        assert isinstance(source, OnvifSource)
        assert source.signals() is None
        wait_for(lambda: camera.asked.count("device/GetServices") > 2, LONG_S)
        assert source.signals() is None
    (line,) = [one for one in caplog.messages if "cannot receive events" in one]
    assert line.startswith("stream door: cannot receive events from the camera")
    assert "secret" not in line
