from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.engine import Engine
from saccade.engine.tasks import Detect
from saccade.pipeline.config import ShareSettings
from saccade.pipeline.runtime.engine_stream import EngineStream
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.sinks import JsonlSink
from saccade.sources import open_source
from saccade.sources.replay import ReplaySource
from tests.support import REPO

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
LONG_S = 60  # far beyond what any of these needs; only so that a deadlock fails instead of hanging


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("max_fps", "live", "after_s", "beyond"),
    [(2.0, True, 0.4, True), (2.0, True, 0.6, False), (2.0, False, 0.4, False), (None, True, 0.0, False)],
)
def test_a_frame_is_beyond_the_rate_behind_one_begun(
    engine: Engine, max_fps: float | None, live: bool, after_s: float, beyond: bool
) -> None:
    stream = EngineStream(engine, "door", 1, ShareSettings(max_fps=max_fps), live=live, newest=True)
    stream.configure()
    assert not stream.beyond_rate(0.0)
    frame, now = next(iter(open_source(CLIP))), time.monotonic()
    stream.submit(frame, [Detect("person")], 1, now).result(LONG_S)
    assert stream.beyond_rate(now + after_s) is beyond
    stream.close()


def test_frames_beyond_max_fps_are_counted_as_such(engine: Engine, tmp_path: Path) -> None:
    source = ReplaySource(open_source(CLIP))
    run = Run(
        source,
        engine,
        [Detect("person")],
        [Output(JsonlSink(tmp_path / "out.jsonl"))],
        share=ShareSettings(max_fps=1.0),
    )
    run.start()
    deadline = time.monotonic() + LONG_S
    while run.report().frames < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    run.stop()
    assert run.join(LONG_S)
    drops = run.report().drops
    assert drops["max_fps"] > max(5, drops.get("full", 0))
