"""A live camera recorded in segments while it goes away and comes back, and Chromium plays what was recorded."""

from __future__ import annotations

import http.server
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.ingest import burnt_in_age_ms
from saccade.engine.results import Box, Detections, Points, Result
from saccade.sinks import Latency, RecordingSink, open_sink
from saccade.sources import FileSource, LiveSource, open_source
from tests.support import REPO, cameras
from tests.support.browser import browsing, needs_chromium
from tests.support.cameras import LONG_S, Camera, wait_for

pytestmark = pytest.mark.e2e

RESULT = Result(Detections((Box("square", 0.9, 0.3, 0.4, 0.5, 0.6),), 640, 360), Points((), 640, 360))
AWAY_S = 2.0
SEGMENT_S = 3

KILLED = """
import itertools, os, signal, sys
sys.path.insert(0, sys.argv[1])
from saccade.engine.results import Detections, Points, Result
from saccade.sinks import Latency, RecordingSink
from saccade.sources import FileSource
sink = RecordingSink(sys.argv[2])
for frame in itertools.islice(FileSource(sys.argv[1] + "/pipeline/assets/demo.mp4"), 130):
    sink.write(frame, Result(Detections((), 1, 1), Points((), 1, 1)), Latency())
os.kill(os.getpid(), signal.SIGKILL)
"""

PAGE = """<!doctype html><video muted></video><script>
const video = document.querySelector("video"), played = [];
const report = () => fetch("http://127.0.0.1:PORT/", {method: "POST", mode: "no-cors", body: JSON.stringify(played)});
const names = NAMES;
function next() {
  if (played.length == names.length) return report();
  video.src = names[played.length];
  video.playbackRate = 4;
  video.play().catch(error => { played.push({error: String(error)}); next(); });
}
video.onended = () => {
  played.push({duration: video.duration, at: video.currentTime, width: video.videoWidth,
             frames: video.getVideoPlaybackQuality().totalVideoFrames});
  next();
};
next();
</script>"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[tuple[Fraction, int]]]:
    """The segments, and of every frame written, its time on the stream's clock and the sender's clock in ms."""
    cameras.need_servers()
    folder = tmp_path_factory.mktemp("recording")
    written: list[tuple[Fraction, int]] = []
    with Camera("--fps", 30) as camera:
        source = open_source(camera.url())
        assert isinstance(source, LiveSource)
        sink = open_sink(f"{folder}/%Y/door-%Y%m%d-%H%M%S.mp4?segment={SEGMENT_S}")
        assert isinstance(sink, RecordingSink)

        def run() -> None:
            for frame in source:
                now = time.time()
                age = burnt_in_age_ms(frame.image, now)
                assert age is not None
                sink.write(frame, RESULT, Latency())
                written.append((frame.pts * frame.time_base, round(now * 1000 - age)))
            sink.close()

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: len(written) > 100, LONG_S)
        camera.off()
        seen = len(written)
        time.sleep(AWAY_S)
        camera.on()
        wait_for(lambda: len(written) > seen + 60, LONG_S)
        source.close()
        thread.join(LONG_S)
        assert not thread.is_alive()
    return sorted(folder.rglob("*.mp4")), written


def test_the_time_recorded_is_the_time_that_passed(
    recorded: tuple[list[Path], list[tuple[Fraction, int]]],
) -> None:
    paths, written = recorded
    assert len(paths) >= 2
    sources = [FileSource(path) for path in paths]
    frames = [list(source) for source in sources]
    assert sum(map(len, frames)) == len(written)  # every frame is there
    assert all(segment[0].pts == 0 for segment in frames)
    # Their own times, file after file, are those of the camera's clock, the time it was away included.
    begun = 0.0
    places = []
    for source, segment in zip(sources, frames, strict=True):
        places += [begun + float(frame.pts * frame.time_base) for frame in segment]
        assert source.info.duration_s is not None
        begun += source.info.duration_s
    assert places == pytest.approx([float(at - written[0][0]) for at, _ in written], abs=0.002)
    gap = max(b - a for a, b in itertools.pairwise(places))
    assert gap > AWAY_S
    for place, (_, sent_ms) in zip(places, written, strict=True):
        assert place == pytest.approx((sent_ms - written[0][1]) / 1000, abs=0.5)  # the machine has other things to do


def killed(folder: Path) -> Path:
    """A recording of 130 frames whose process was killed."""
    command = [sys.executable, "-c", KILLED, str(REPO), str(folder / "killed.mp4")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (path,) = folder.glob("killed-*.mp4")
    return path


@needs_chromium
def test_chromium_plays_every_segment_even_after_a_kill(
    recorded: tuple[list[Path], list[tuple[Fraction, int]]], tmp_path: Path
) -> None:
    paths = [*recorded[0], killed(tmp_path)]
    answers: list[list[dict[str, float]]] = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        page = tmp_path / "play.html"
        names = json.dumps([path.as_uri() for path in paths])
        page.write_text(PAGE.replace("PORT", str(server.server_port)).replace("NAMES", names), encoding="utf-8")
        try:
            with browsing(page.as_uri(), tmp_path / "profile"):
                wait_for(lambda: bool(answers), 2 * LONG_S)
        finally:
            server.shutdown()
            thread.join()
    for path, played in zip(paths, answers[0], strict=True):
        assert played.get("width", 0) >= 640, played
        assert played["duration"] == pytest.approx(FileSource(path).info.duration_s, abs=0.05)
        assert played["at"] == pytest.approx(played["duration"], abs=0.05)
        assert played["frames"] > 5
    played = answers[0][-1]
    rate = FileSource(REPO / "pipeline/assets/demo.mp4").info.average_rate
    assert rate is not None
    assert played["duration"] >= 130 / rate - 2.1  # all but the last group of frames
