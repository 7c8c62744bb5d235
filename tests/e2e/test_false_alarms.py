"""A bush that nano takes for a person: marked as a false alarm, it makes no more events. Persons are still found.

The verdict applies to the running stream at once, also on a worker and on the one that replaces it.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.events.verdicts import MOST_VERDICTS
from saccade.pipeline.run import opened_run
from tests.pipeline.events.storage.test_store import event as stored_event
from tests.support.cameras import wait_for

pytestmark = pytest.mark.e2e

LONG_S = 300
RATE = 10
TOP, BOTTOM, LEFT, RIGHT = 0, 325, 310, 465  # of a person in the demo clip
BUSH_X = 60
CALM = 500  # frames with nothing but the bush
Image = NDArray[np.uint8]


class Garden:
    """A room with a bush: the outline of a person in a leafy texture. A person can stand or walk in front of it."""

    def __init__(self) -> None:
        with av.open(DEMO_CLIP) as clip:
            frames = [frame.to_ndarray(format="rgb24") for frame in islice(clip.decode(video=0), 121)]
        empty, shown = frames[60], frames[120]
        cut = np.s_[TOP:BOTTOM, LEFT:RIGHT]
        differs = (np.abs(shown[cut].astype(int) - empty[cut]).sum(2) > 40).astype(np.uint8)
        closed = cv2.morphologyEx(differs, cv2.MORPH_CLOSE, np.ones((15, 15), np.uint8)).astype(np.float32)
        self._outline = cv2.GaussianBlur(closed, (0, 0), 2)[..., None]
        self._person = shown[cut].astype(np.float32)
        height, width = self._person.shape[:2]
        self._dice = np.random.default_rng(0)
        coarse = self._dice.random((height // 6, width // 6)).astype(np.float32)
        leaves = np.array([40, 95, 35], np.float32) * (0.4 + 1.2 * cv2.resize(coarse, (width, height))[..., None])
        self._scene = self._with(empty.astype(np.float32), 0.5 * leaves + 0.5 * self._person, BUSH_X)

    def frame(self, person_x: int | None = None) -> Image:
        """Return a noisy frame, with a person whose left edge is at `person_x`."""
        image = self._scene if person_x is None else self._with(self._scene, self._person, person_x)
        return (image + self._dice.normal(0, 4, image.shape)).clip(0, 255).astype(np.uint8)

    def _with(self, image: NDArray[np.float32], sprite: NDArray[np.float32], x: int) -> NDArray[np.float32]:
        image, to = image.copy(), np.s_[TOP:BOTTOM, x : x + sprite.shape[1]]
        image[to] = image[to] * (1 - self._outline) + sprite * self._outline
        return image


def write(path: Path, frames: list[Image]) -> Path:
    with av.open(str(path), "w") as file:
        video = file.add_stream("libx264", rate=RATE, options={"crf": "18", "preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = frames[0].shape[1], frames[0].shape[0], "yuv420p"
        for image in frames:
            file.mux(video.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        file.mux(video.encode())
    return path


def ask(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
    with urllib.request.urlopen(request, timeout=LONG_S) as answer:
        text = answer.read()
        return json.loads(text) if text else answer.status


def places(frame: dict[str, Any]) -> list[tuple[float, float, float, float]]:
    return [tuple(one["box_norm"]) for one in frame["objects"] if not one.get("predicted")]


def watch(clip: Path, folder: Path, verdict: tuple[int, bool] | None = None) -> tuple[list[Any], list[Any], Any]:
    """Run a clip to its end, and then judge one of the events.

    Returns:
        The events, newest first. The records of all frames. The response of `/events/verdicts` before judging.
    """
    records = clip.with_suffix(".jsonl")
    config = load(
        None,
        {
            "source": str(clip),
            "name": "garden",
            "rules": ["visitor=person"],
            "store": str(folder),
            "device": "cpu",
            "sinks": [str(records)],
            "http": "127.0.0.1:0",
        },
    )
    with opened_run(config) as opened:
        (run,) = opened.controller.start()
        assert run.join(LONG_S)
        assert run.error is None
        store = opened.controller.local.store
        assert store is not None
        opened.controller.local.events.hub.flush()
        store.flush()
        events = ask(f"{opened.url}/events")["events"]
        judged = ask(f"{opened.url}/events/verdicts")["verdicts"]
        if verdict is not None:
            url = f"{opened.url}/events/{events[verdict[0]]['id']}"
            assert ask(f"{url}/verdict", {"false_alarm": verdict[1]}) == 204
            assert ask(url).get("false_alarm", False) is verdict[1]
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    records.unlink()
    return events, lines, judged


def test_a_bush_alarms_once_and_persons_are_found(tmp_path: Path) -> None:
    garden, store = Garden(), tmp_path / "store"
    bush = write(tmp_path / "bush.mp4", [garden.frame() for _ in range(20)])
    steps = list(range(480, 0, -24))  # from right to left, over the bush
    calm = [garden.frame() for _ in range(CALM)]
    walk = write(tmp_path / "walk.mp4", [*calm, *map(garden.frame, steps)])

    events, _, judged = watch(bush, store, (0, True))
    assert (len(events), judged) == (1, [])
    false_alarm = events[0]["id"]

    events, frames, judged = watch(walk, store)
    assert len(frames) == CALM + len(steps)
    assert not any(frame["objects"] for frame in frames[:CALM])
    assert [one["id"] for one in events[1:]] == [false_alarm]  # the newest event is that of the person
    assert events[0]["start_time"] >= CALM / RATE
    for x, frame in zip(steps, frames[CALM:], strict=True):
        middle = (x + (RIGHT - LEFT) / 2) / 640
        assert any(abs((x1 + x2) / 2 - middle) < 0.05 for x1, _, x2, _ in places(frame)), x
    assert [one["event"] for one in judged] == [false_alarm]
    assert judged[0]["by_look"]

    watch(bush, store, (1, False))  # removes the verdict
    events, _, judged = watch(bush, store)
    assert (len(events), judged) == (3, [])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_verdict_applies_to_the_running_stream(workers: int, tmp_path: Path) -> None:
    if workers and find_spec("ray") is None:
        pytest.skip("the extra `ray` is not installed")
    garden, records = Garden(), tmp_path / "all.jsonl"
    stream = {
        "name": "garden",
        "source": str(write(tmp_path / "bush.mp4", [garden.frame() for _ in range(20)])),
        "loop": True,
        "max_fps": 5,
        "rules": [{"name": "visitor", "when": "person"}],
    }
    run = {"streams": [stream], "store": str(tmp_path / "store"), "device": "cpu", "sinks": [str(records)]}
    config = RunConfig.model_validate({**run, "http": "127.0.0.1:0", **({"workers": workers} if workers else {})})
    with opened_run(config) as opened:
        opened.controller.start()
        url = f"{opened.url}/events"

        def ids() -> list[str]:
            return [one["id"] for one in ask(f"{url}?rule=visitor")["events"]]

        def fires_again(known: list[str]) -> str:
            wait_for(lambda: len(ids()) > len(known), LONG_S)
            newest, *others = ids()
            assert others == known
            return newest

        def holds_back(event: str) -> None:
            """Wait until the event has ended and 10 more finds are held back."""
            wait_for(lambda: ask(f"{url}/{event}")["end_time"] is not None, LONG_S)
            before = ask(f"{url}/{event}")["held_back"]
            wait_for(lambda: ask(f"{url}/{event}")["held_back"] >= before + 10, LONG_S)

        first = fires_again([])
        assert "false_alarm" not in ask(f"{url}/{first}")
        assert ask(f"{url}/{first}/verdict", {"false_alarm": True}) == 204
        holds_back(first)
        assert ask(f"{url}/{first}")["false_alarm"]
        (listed,) = ask(f"{url}/verdicts?stream=garden")["verdicts"]
        assert (listed["event"], listed["by_look"], listed["held_back"] > 0) == (first, True, True)
        lines = records.read_text().splitlines()[:-1]  # the last one may be incomplete
        record = next(one for one in map(json.loads, reversed(lines)) if "held_back" in one)
        assert (record["objects"], [one["event"] for one in record["held_back"]]) == ([], [first])
        metrics = urllib.request.urlopen(f"{opened.url}/metrics", timeout=LONG_S).read().decode()
        assert 'saccade_finds_held_back_total{stream="garden"}' in metrics

        if workers:
            pid = ask(f"{opened.url}/workers")["workers"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: ask(f"{opened.url}/workers")["workers"][0]["pid"] not in (None, pid), LONG_S)
            holds_back(first)
        assert ids() == [first]

        assert ask(f"{url}/{first}/verdict", {"false_alarm": False}) == 204
        second = fires_again([first])
        assert ask(f"{url}/verdicts")["verdicts"] == []

        assert ask(f"{url}/{second}/verdict", {"false_alarm": True}) == 204
        holds_back(second)
        store: Any = opened.controller.runner.store
        corner = {**stored_event(0), "stream": "garden", "rule": "other", "box_norm": [0.9, 0.9, 1.0, 1.0]}
        others = [f"e{number}" for number in range(MOST_VERDICTS)]
        for name in others:
            store.write({**corner, "id": name})
            assert ids() == [second, first]
            assert ask(f"{url}/{name}/verdict", {"false_alarm": True}) == 204
        assert [one["event"] for one in ask(f"{url}/verdicts")["verdicts"]] == others  # without the oldest
        fires_again([second, first])
