from __future__ import annotations

import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.stream_names import check_name, free_name, name_of
from saccade.sources import open_source


@pytest.mark.parametrize("name", ["door", "cam_1", "10.0.0.7-554-live", "Tür", "a" * 64])
def test_names_that_may_be(name: str) -> None:
    assert check_name(name) == name
    assert free_name(name, ()) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "a#", "+", "a\n", "a" * 65, "{stream}"])
def test_names_that_may_not_be(name: str) -> None:
    with pytest.raises(ValueError, match="invalid stream name") as error:
        check_name(name)
    assert "\n" not in str(error.value)
    check_name(free_name(name, ()))


@pytest.mark.parametrize(
    ("wanted", "taken", "name"),
    [
        ("door", [], "door"),
        ("door", ["door"], "door-2"),
        ("door", ["door", "door-2"], "door-3"),
        ("my holiday (1)", [], "my-holiday-1"),
        ("../../etc/passwd", [], "etc-passwd"),
        ("", [], "stream"),
        ("…", ["stream"], "stream-2"),
        ("a" * 80, ["a" * 64], "a" * 62 + "-2"),
    ],
)
def test_a_free_name_is_found(wanted: str, taken: list[str], name: str) -> None:
    assert free_name(wanted, taken) == name


@pytest.mark.parametrize(
    "source",
    ["webrtc:0", "webrtc://127.0.0.1:0/door?token=secret", "rtsp://user:secret@127.0.0.1:1/live", str(DEMO_CLIP)],
)
def test_a_stream_is_called_as_its_source_calls_itself(source: str) -> None:
    opened = open_source(source)
    try:
        assert name_of(source) == opened.name
    finally:
        opened.close()
