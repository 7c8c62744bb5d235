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
from tests.support.clips import Noise

pytestmark = pytest.mark.e2e

LONG_S = 300
RATE = 10
TOP, BOTTOM, LEFT, RIGHT = 0, 325, 310, 465  # of a person in the demo clip
BUSH_X = 60
CALM = 200  # frames with nothing but the bush
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
        self._noise = Noise(4, empty.shape[1], empty.shape[0])
        coarse = np.random.default_rng(0).random((height // 6, width // 6)).astype(np.float32)
        leaves = np.array([40, 95, 35], np.float32) * (0.4 + 1.2 * cv2.resize(coarse, (width, height))[..., None])
        self._scene = self._with(empty.astype(np.float32), 0.5 * leaves + 0.5 * self._person, BUSH_X)

    def frame(self, person_x: int | None = None) -> Image:
        """Return a noisy frame, with a person whose left edge is at `person_x`."""
        image = self._scene if person_x is None else self._with(self._scene, self._person, person_x)
        return (image + self._noise.part()).clip(0, 255).astype(np.uint8)

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


def test_an_event_that_has_ended_is_marked_and_does_not_begin_in_the_next_loops(tmp_path: Path) -> None:
    """A person stands at the table until 4 s and leaves to the right, so the last box of the event is elsewhere."""
    settings = {"source": str(DEMO_CLIP), "name": "hall", "loop": True, "end": 4.5, "vid_stride": 2, "device": "cpu"}
    rules = {"zones": {"table": ".4,0,.8,0,.8,1,.4,1"}, "rules": ["visitor=person in table for 2s"]}
    with opened_run(load(None, {**settings, **rules, "store": str(tmp_path), "http": "127.0.0.1:0"})) as opened:
        (run,) = opened.controller.start()
        listed = f"{opened.url}/events"
        wait_for(lambda: any(one["end_time"] for one in ask(listed)["events"]), LONG_S)
        (event,) = ask(listed)["events"]
        assert event["start_time"] - event["since"] == pytest.approx(2, abs=0.15)
        assert ask(f"{listed}/{event['id']}/verdict", {"false_alarm": True}) == 204
        read = run.report().read
        wait_for(lambda: run.report().read >= read + 45, LONG_S)  # two loops
        opened.controller.local.events.hub.flush()
        assert [one["id"] for one in ask(listed)["events"]] == [event["id"]]
        assert ask(f"{listed}/{event['id']}")["held_back"] > 10


class Live:
    """A run that watches the bush all the time, over HTTP."""

    def __init__(self, url: str, records: Path) -> None:
        self.url, self._records = url, records

    def ids(self) -> list[str]:
        return [one["id"] for one in ask(f"{self.url}/events?rule=visitor")["events"]]

    def event(self, name: str) -> dict[str, Any]:
        return dict(ask(f"{self.url}/events/{name}"))

    def verdicts(self) -> list[dict[str, Any]]:
        return list(ask(f"{self.url}/events/verdicts?stream=garden")["verdicts"])

    def judge(self, name: str, *, false_alarm: bool) -> None:
        assert ask(f"{self.url}/events/{name}/verdict", {"false_alarm": false_alarm}) == 204

    def records(self) -> list[dict[str, Any]]:
        """Return the records so far, without the last one, which may be incomplete."""
        return [json.loads(line) for line in self._records.read_text().splitlines()[:-1]]

    def worker(self) -> dict[str, Any]:
        found = ask(f"{self.url}/workers")["workers"]
        return next((one for one in found if "garden" in one["streams"]), {"name": None})

    def fires(self, known: list[str]) -> str:
        """Wait for another event, and until its appearance is stored; returns its ID."""
        wait_for(lambda: len(self.ids()) > len(known), LONG_S)
        newest = self.ids()[0]
        start = self.event(newest)["start_time"]
        wait_for(lambda: any(one["captured_at"] > start + 1 for one in self.records()), LONG_S)
        return self.ids()[0]  # on a slow machine, dropped frames have ended the event

    def is_calm(self, name: str) -> list[str]:
        """Wait until all events have ended and 20 finds are held back; returns the IDs of the events."""

        def wait_for_finds(count: int) -> None:
            before = self.event(name)["held_back"]
            wait_for(lambda: self.event(name)["held_back"] >= before + count, LONG_S)

        wait_for_finds(10)
        known = self.ids()
        assert all(self.event(one)["end_time"] is not None for one in known)
        wait_for_finds(10)
        assert self.ids() == known
        return known


@pytest.mark.parametrize("workers", [1, 2])
def test_a_verdict_applies_to_the_running_stream(workers: int, tmp_path: Path) -> None:
    if workers > 1 and find_spec("ray") is None:
        pytest.skip("the extra `ray` is not installed")
    garden = Garden()
    clip = write(tmp_path / "bush.mp4", [garden.frame() for _ in range(20)])
    stream = {"name": "garden", "source": str(clip), "loop": True, "max_fps": 5}
    values = {
        "streams": [{**stream, "rules": [{"name": "visitor", "when": "person"}]}],
        "store": str(tmp_path / "store"),
        "sinks": [str(tmp_path / "all.jsonl")],
        "http": "127.0.0.1:0",
        "device": "cpu",
        "workers": workers,
    }
    with opened_run(RunConfig.model_validate(values)) as opened:
        opened.controller.start()
        live = Live(str(opened.url), tmp_path / "all.jsonl")
        first = live.fires([])
        assert "false_alarm" not in live.event(first)
        live.judge(first, false_alarm=True)
        known = live.is_calm(first)
        assert live.event(first)["false_alarm"]
        (listed,) = live.verdicts()
        assert (listed["event"], listed["by_look"], listed["held_back"] > 0) == (first, True, True)
        record = next(one for one in reversed(live.records()) if "held_back" in one)
        assert (record["objects"], [one["event"] for one in record["held_back"]]) == ([], [first])
        if workers > 1:
            before = live.worker()
            os.kill(before["pid"], signal.SIGKILL)
            wait_for(lambda: live.worker()["name"] not in (None, before["name"]), LONG_S)
            assert live.is_calm(first) == known

        live.judge(first, false_alarm=False)
        second = live.fires(known)
        assert live.verdicts() == []

        live.judge(second, false_alarm=True)
        known = live.is_calm(second)
        store: Any = opened.controller.runner.store
        corner = {**stored_event(0), "stream": "garden", "rule": "other", "box_norm": [0.9, 0.9, 1.0, 1.0]}
        others = [f"e{number}" for number in range(MOST_VERDICTS)]
        for name in others:
            assert live.ids() == known
            store.write({**corner, "id": name})
            live.judge(name, false_alarm=True)
        assert [one["event"] for one in live.verdicts()] == others  # without the oldest
        live.fires(known)
