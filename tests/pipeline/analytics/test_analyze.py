"""Zones, lines and counts of a stream end to end: through a configuration, over HTTP, in records and in metrics."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from saccade.engine import Engine
from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline import Streams, load, opened_run
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.counts import CountLog, Totals
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.api.prometheus import Metrics
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.control.local import Local
from saccade.sinks import Latency
from saccade.sinks.overlay import draw
from saccade.sinks.record import make_record
from saccade.sources import open_source
from saccade.sources.replay import ReplaySource
from tests.support.control import attach, controller_of
from tests.support.sinks.results import live_frame

LONG_S = 60
REGIONS = {"zones": {"hall": "0,0,.5,0,.5,1,0,1"}, "lines": {"gate": ".5,1,.5,0"}}


def walk(stage: AnalyzeStage, seconds: float = 4, fps: float = 10) -> list[Result]:
    """The results while a person walks from left to right, and a dog back."""
    results = []
    for number in range(round(seconds * fps)):
        x = 0.1 + 0.8 * number / (seconds * fps - 1)
        person, dog = Box("person", 0.9, x - 0.05, 0.2, x + 0.05, 0.6), Box("dog", 0.8, 0.95 - x, 0.6, 1.05 - x, 0.9)
        found = Result(Detections((person, dog), 200, 100), Points((), 200, 100))
        results.append(stage.process(live_frame(number / fps), found))
    return results


def test_without_settings_a_result_stays_as_it_is() -> None:
    found = Result(Detections((Box("person", 0.9, 0, 0, 1, 1),), 200, 100), Points((), 200, 100))
    assert AnalyzeStage().process(live_frame(0), found) is found


def test_a_zone_that_excludes_a_label_removes_its_objects_before_they_are_tracked() -> None:
    mask = {"polygon": "0,0,.5,0,.5,1,0,1", "classes": ["person"], "exclude": True}
    stage = AnalyzeStage(AnalyticsSettings.model_validate({"zones": {"bush": mask}}), track=True)
    seen = [(box.label, box.x1 > 0.45, box.predicted) for result in walk(stage) for box in result.detections.boxes]
    assert {one for one in seen if one[0] == "person"} == {("person", True, False)}
    assert {one for one in seen if one[0] == "dog"} >= {("dog", True, False), ("dog", False, False)}
    assert stage.totals().objects == {"person": 1, "dog": 1}
    assert stage.totals().zones == {}


def test_records_have_zones_lines_and_counts() -> None:
    results = walk(AnalyzeStage(AnalyticsSettings.model_validate(REGIONS)))
    records = [make_record(live_frame(n / 10), result, Latency()) for n, result in enumerate(results)]
    first, last = records[10], records[-1]
    person = next(found for found in first["objects"] if found["label"] == "person")
    assert (person["track_id"], person["track"], person["zones"]) == (1, 1, ["hall"])
    assert abs(person["speed"] - 0.205) < 0.03
    (zone,) = first["zones"]
    assert (zone["name"], zone["inside"], zone["entered"], zone["left"]) == ("hall", 1, 1, 0)
    assert zone["tracks"] == [{"track_id": 1, "dwell_s": 1.0, "loitering": False}]
    (zone,) = last["zones"]
    assert zone["counts"] == {
        "dog": {"inside": 1, "entered": 1, "left": 0},
        "person": {"inside": 0, "entered": 1, "left": 1},
    }
    assert last["lines"] == [
        {
            "name": "gate",
            "forward": 1,
            "backward": 1,
            "counts": {"dog": {"forward": 0, "backward": 1}, "person": {"forward": 1, "backward": 0}},
        }
    ]
    assert last["schema"] == "saccade/2"
    json.dumps(records)
    image = np.zeros((360, 640, 3), np.uint8)
    assert draw(image, results[20]).any()


def test_a_zone_that_is_kept_keeps_its_counts() -> None:
    stage = AnalyzeStage(AnalyticsSettings.model_validate(REGIONS))
    walk(stage)
    wider = {**REGIONS, "zones": {**REGIONS["zones"], "all": "0,0,1,0,1,1,0,1"}}
    stage.configure(AnalyticsSettings.model_validate(wider))
    assert stage.totals().lines["gate"]["person"] == {"forward": 1, "backward": 0}
    assert stage.totals().zones["hall"]["person"]["left"] == 1
    assert stage.totals().zones["all"] == {}


def test_each_minute_has_its_own_counts() -> None:
    log, totals = CountLog(), Totals()
    for second in range(0, 200, 10):
        if log.due(1000 + second):
            log.turn(1000 + second, totals)
        totals = Totals({"person": second // 10 + 1}, {"hall": {"person": {"inside": 2, "entered": second}}})
    minutes = log.since(0, totals)
    assert [(minute.start, minute.counts.objects) for minute in minutes] == [
        (960, {"person": 2}),
        (1020, {"person": 6}),
        (1080, {"person": 6}),
        (1140, {"person": 6}),
    ]
    assert minutes[1].counts.zones == {"hall": {"person": {"inside": 2, "entered": 60}}}
    assert [minute.start for minute in log.since(1140, totals)] == [1080 + 60]


def test_a_clock_that_falls_back_a_little_begins_no_minute_again() -> None:
    log, count = CountLog(), 0
    for seconds in (30.0, 59.9, 60.1, 59.95, 60.2, 119.9, 120.1, 3.0):
        if log.due(seconds):
            log.turn(seconds, Totals({"person": count}))
        count += 1
    minutes = log.since(0, Totals({"person": count}))
    counts = [(minute.start, minute.counts.objects["person"]) for minute in minutes]
    assert counts == [(0, 2), (60, 4), (120, 1), (0, 1)]  # the last one of a file that begins again


def test_a_zone_that_was_changed_counts_from_zero_in_its_minute() -> None:
    def totals(entered: int) -> Totals:
        return Totals({}, {"door": {"person": {"entered": entered, "inside": 1}}})

    assert totals(3).since(totals(10)).zones == {"door": {"person": {"entered": 3, "inside": 1}}}
    assert totals(13).since(totals(10)).zones == {"door": {"person": {"entered": 3, "inside": 1}}}


def test_a_configuration_counts_in_zones(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    wanted: dict[str, Any] = {"source": str(DEMO_CLIP), "detect": "person", "conf": 0.3, "start": 8, "end": 10}
    wanted |= {"zones": ["all=0,0,1,0,1,1,0,1"], "jsonl": str(out)}
    with opened_run(load(None, wanted)) as opened:
        assert all(run.join(LONG_S) for run in opened.controller.start())
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[-1]["zones"][0]["entered"] == 1


def test_zones_are_changed_over_http_while_a_stream_runs() -> None:
    with Engine.load("nano", device="cpu") as engine, Streams(engine) as streams:
        source = ReplaySource(open_source(DEMO_CLIP, start=8, end=12))
        with closing(serve(controller := controller_of(streams), "127.0.0.1", 0, None)) as server:

            def ask(method: str, path: str, body: object = None) -> tuple[int, Any]:
                place = urlsplit(server.url)
                connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=LONG_S)
                kind = {"Content-Type": "application/json"}
                connection.request(method, path, None if body is None else json.dumps(body).encode(), kind)
                answer = connection.getresponse()
                text = answer.read()
                connection.close()
                if answer.getheader("Content-Type") == "image/png":
                    return answer.status, text
                return answer.status, json.loads(text) if text else None

            attach(controller, "door", source, conf=0.3)
            assert ask("GET", "/streams/door/zones") == (200, {"zones": {}, "lines": {}})
            assert ask("PUT", "/streams/door/zones", {"zones": {"door": "0,0"}})[0] == 422
            status, regions = ask("PUT", "/streams/door/zones", {"zones": {"all": "0,0,1,0,1,1,0,1"}, "lines": {}})
            assert (status, regions["zones"]["all"]["anchor"]) == (200, "bottom")
            totals: dict[str, Any] = {}
            deadline = time.monotonic() + LONG_S
            while not totals.get("zones", {}).get("all", {}).get("person"):
                assert time.monotonic() < deadline
                time.sleep(0.1)
                totals = ask("GET", "/streams/door/counts")[1]["totals"]
            assert totals["zones"]["all"]["person"]["entered"] >= 1
            assert ask("GET", "/streams/door/counts?since=nan")[0] == 422
            minutes = ask("GET", "/streams/door/counts?since=0")[1]["minutes"]  # the last has perhaps just begun
            assert max(minute["objects"].get("person", 0) for minute in minutes) >= 1
            status, drawn = ask("GET", "/streams/door/heatmap.png")
            assert (status, drawn[:4]) == (200, b"\x89PNG")
            assert (
                b'saccade_zone_entered_total{class="person",stream="door",zone="all"}'
                in Metrics(Local(streams)).as_text()
            )
            assert ask("DELETE", "/streams/door/zones") == (204, None)
            assert ask("GET", "/streams/door/zones")[1] == {"zones": {}, "lines": {}}
            assert ask("GET", "/streams/none/zones")[0] == 404
        streams.stop()


def test_half_of_the_frames_change_no_count() -> None:
    for seed in range(10):
        stage = AnalyzeStage(AnalyticsSettings.model_validate(REGIONS))
        dice = np.random.default_rng(seed)
        for number in range(100):
            x = 0.1 + 0.8 * number / 99
            found = [Box("person", 0.9, x - 0.05, 0.1, x + 0.05, 0.5), Box("person", 0.9, 0.9 - x, 0.5, 1 - x, 0.9)]
            if number > 1 and dice.random() < 0.5:
                continue
            frame = replace(live_frame(number / 25), captured_at=0.0)
            stage.process(frame, Result(Detections(tuple(found), 200, 100), Points((), 200, 100)))
        assert stage.totals().lines["gate"]["person"] == {"forward": 1, "backward": 1}
        assert stage.totals().zones["hall"]["person"] == {"inside": 1, "entered": 2, "left": 1}
        assert stage.totals().objects == {"person": 2}
