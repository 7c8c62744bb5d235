"""Which sink a target opens, and how another one is added."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from saccade.engine.results import Result
from saccade.sinks import (
    DisplaySink,
    JsonlSink,
    Latency,
    Mp4Sink,
    SinkError,
    SourceHints,
    open_sink,
)
from saccade.sinks import factory as factory_module
from saccade.sinks.factory import SinkKind
from saccade.sources import Frame
from tests.support.sinks.results import FRAME, LATENCY, RESULT


def test_the_suffix_selects_the_sink(tmp_path: Path) -> None:
    assert isinstance(open_sink(tmp_path / "a.mp4"), Mp4Sink)
    assert isinstance(open_sink(str(tmp_path / "a.JSONL")), JsonlSink)
    assert isinstance(open_sink("-"), JsonlSink)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("out.avi", "file name that ends in .mp4 or .jsonl"),
        ("out", "file name that ends in .mp4 or .jsonl"),
        (
            "rtmp://user:secret@host/live",
            "rtmp:// sinks are not supported (rtmp://host); use ws, mqtt, http, whep:PORT or a file",
        ),
        ("out.jsonl?max_mb=0", "out.jsonl: max_mb should be a number above 0, not '0'"),
        (
            "out.jsonl?keep=none",
            "out.jsonl: keep should be a whole number from 1 to 1000, or a time such as 12h or 7d, not 'none'",
        ),
        ("out.jsonl?keep=2", "out.jsonl: options keep and max_gb need max_mb"),
        ("out.jsonl?max=1", "out.jsonl: unknown option 'max'; did you mean 'max_mb'?"),
        ("no/such/folder/out.jsonl", "cannot write no/such/folder/out.jsonl: the folder no/such/folder does not exist"),
        ("no/such/folder/out.mp4", "cannot write no/such/folder/out.mp4: the folder no/such/folder does not exist"),
    ],
)
def test_an_invalid_target_is_refused_in_one_line(target: str, expected: str) -> None:
    with pytest.raises(SinkError) as caught:
        open_sink(target)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("display", ["", ":987"])
def test_a_missing_display_is_one_line(monkeypatch: pytest.MonkeyPatch, display: str) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", display)
    with pytest.raises(SinkError, match="display"):
        DisplaySink()


class ToySink:
    """A sink as a user might add one: it keeps labels."""

    shared = False

    def __init__(self, target: str, hints: SourceHints) -> None:
        self.opened = target, hints.rate
        self.labels: list[str] = []

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        self.labels += [box.label for box in result.detections.boxes]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("target", ["toy://host/path", "TOY://x", "labels.toy", "labels.TOY?limit=3", "toy"])
def test_a_sink_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    with pytest.raises(SinkError):
        open_sink(target)
    kind = SinkKind(f"{__name__}:ToySink", schemes=("toy",), suffixes=(".toy",), words=("toy",))
    monkeypatch.setattr(factory_module, "SINKS", [*factory_module.SINKS, kind])
    sink = open_sink(target, rate=Fraction(30))
    assert isinstance(sink, ToySink)
    sink.write(FRAME, RESULT, LATENCY)
    assert (sink.opened, sink.labels) == ((target, 30), ["person"])
