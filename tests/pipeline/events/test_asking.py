"""Questions of rules put to a model: a scripted one that is slow, late or away, and a real one beside nano."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from saccade.engine import DeadlineError, Engine
from saccade.engine.core.admission import StreamSettings
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.asking import MAX_ASKED, Asker, ModelAskEngine, crop
from saccade.pipeline.events.questions import FRAME, Question
from saccade.pipeline.events.record import Change, History, RuleList
from saccade.pipeline.events.settings import EventSettings
from saccade.pipeline.events.stage import EventStage
from saccade.pipeline.run import opened_run
from tests.pipeline.events.scripted import scene, straight, walk
from tests.support.engine import TINY, noise, random_model, write_model
from tests.support.engine.simulation import Camera, Seen, Simulation

LONG_S = 60  # far beyond what any of these needs; only so that a hang fails
Answered = Future[tuple[str, Mapping[str, float]]]


class Scripted:
    """Keeps every question with its image, to be answered when it suits."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[int, ...], float]] = []
        self.futures: list[Answered] = []

    def ask(self, image: NDArray[np.uint8], text: str, choices: tuple[str, ...], deadline_s: float) -> Answered:
        self.asked.append((text, image.shape[:2], deadline_s))
        self.futures.append(Future())
        return self.futures[-1]

    def respond(self, p_yes: float) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(("yes" if p_yes >= 0.5 else "no", {"yes": p_yes, "no": 1 - p_yes}))


def question(track: int = FRAME) -> Question:
    return Question("rule", "ask", "", track, "Is it?", ("yes", "no"))


def ask(asker: Asker, number: int = 1, track: int = FRAME) -> list[bool]:
    return [asker.ask(question(track), scene(0, {1: "person"}), noise(100, 200)) for _ in range(number)]


def test_a_few_questions_are_under_way_at_a_time() -> None:
    engine = Scripted()
    asker = Asker(engine, deadline_s=1.5)
    assert ask(asker, MAX_ASKED + 2) == [True] * MAX_ASKED + [False] * 2
    assert asker.answers() == []
    engine.futures[1].set_result(("no", {"yes": 0.2, "no": 0.8}))
    (answer,) = asker.answers()
    assert (answer.text, answer.probabilities["yes"]) == ("no", 0.2)
    assert ask(asker) == [True]
    assert engine.asked[0] == ("Is it?", (100, 200), 1.5)
    asker.close()
    assert all(future.cancelled() for future in engine.futures if future is not engine.futures[1])


def test_what_is_late_or_away_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    engine = Scripted()
    asker = Asker(engine)
    ask(asker, 3)
    engine.futures[0].set_exception(DeadlineError("passed"))
    engine.futures[1].set_exception(DeadlineError("passed"))
    engine.futures[2].cancel()
    assert [answer.text for answer in asker.answers()] == [None] * 3
    assert caplog.text.count("the model failed to answer a question: the deadline has passed") == 1

    class Away:
        def ask(self, *arguments: object) -> Answered:
            raise RuntimeError("the engine is closed")

    gone = Asker(Away())
    assert ask(gone) == [True]
    assert gone.answers()[0].text is None


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        ((0.25, 0.2, 0.5, 0.7), (60, 60)),  # 50 × 50 pixels, and a tenth on each side
        ((0.0, 0.0, 1.0, 1.0), (100, 200)),
        ((0.5, 0.5, 0.5, 0.5), (32, 32)),
        ((0.99, 0.99, 1.0, 1.0), (17, 17)),
    ],
)
def test_a_crop_shows_a_little_more_than_the_box(
    box: tuple[float, float, float, float], shape: tuple[int, int]
) -> None:
    cut = crop(noise(100, 200), box)
    assert cut.shape == (*shape, 3)
    assert cut.flags.c_contiguous


def test_no_frame_waits_for_an_answer() -> None:
    engine = Scripted()
    heard: list[Change | RuleList | History] = []
    rules = [{"name": "rule", "when": "person", "ask": "Is it?", "attributes": {"hat": "Which hat?"}}]
    stage = EventStage(EventSettings.model_validate({"rules": rules}).rules, heard.append, asker=Asker(engine))
    analyze = AnalyzeStage(track=True)
    seen = list(walk({"person": straight((0.1, 0.9), (0.9, 0.9), 0, 8)}, 3))
    for frame, result in seen[:20]:
        stage.process(frame, analyze.process(frame, result))  # nothing is ever answered
    assert [one for one in heard if isinstance(one, Change)] == []
    assert [text for text, _, _ in engine.asked] == ["Which hat?", "Is it?"]
    engine.respond(0.95)
    for frame, result in seen[20:]:
        last = stage.process(frame, analyze.process(frame, result))
    (begun,) = [one for one in heard if isinstance(one, Change)]
    assert (begun.kind, begun.event.p_yes, begun.event.attributes) == ("begin", 0.95, {"hat": "yes"})
    assert [part.to_record(200, 100) for part in last.extras["attributes"]] == [{"track_id": 1, "hat": "yes"}]
    stage.close()


def test_questions_leave_frames_their_time() -> None:
    """The real scheduler with an H200's step times: 64 cameras, more frames than are run, and 8 questions a second."""
    dice = random.Random(1)
    cameras = [Camera(dice.choice([5, 10, 15, 30]), deadline_s=0.2) for _ in range(64)]
    asked = Camera(8, StreamSettings(EventSettings().ask_weight, newest=False), deadline_s=2.0, steps=1)

    def p99_of(seen: list[Seen]) -> float:
        return float(np.percentile([age for one in seen[:64] for age in one.result_ages], 99))

    alone, beside = Simulation(cameras).run(6), Simulation([*cameras, asked]).run(6)
    assert p99_of(beside) <= 1.1 * p99_of(alone)
    assert beside[64].ends == {"done": beside[64].offered}
    assert np.percentile(beside[64].result_ages, 95) <= 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), TINY, random_model(TINY))


@pytest.fixture(scope="module")
def talker(folder: Path) -> Iterator[Engine]:
    with Engine.load(str(folder), "cpu") as engine:
        yield engine


def test_a_model_answers_with_probabilities(talker: Engine) -> None:
    asked = ModelAskEngine(talker)
    text, probabilities = asked.ask(noise(40, 30), "Is it?", ("yes", "no"), LONG_S).result(LONG_S)
    assert text == max(probabilities, key=probabilities.__getitem__)
    assert sum(probabilities.values()) == pytest.approx(1)
    text, probabilities = asked.ask(noise(40, 30), "What is it?", (), LONG_S).result(LONG_S)
    assert (isinstance(text, str), probabilities) == (True, {})
    with pytest.raises(DeadlineError):
        asked.ask(noise(40, 30), "Is it?", ("yes", "no"), 1e-9).result(LONG_S)


def test_another_model_is_asked_in_a_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rule = {
        "name": "visitor",
        "when": "person for 0.3s",
        "ask": "Is this person leaving?",
        "threshold": {"on": 0, "off": 0},  # whatever a model without training answers
        "attributes": {"jacket": {"question": "Which colour?", "choices": ["red", "grey"]}},
    }
    keys = {"source": str(DEMO_CLIP), "end": 1.5, "vid_stride": 2, "rules": [rule], "ask_deadline": LONG_S}
    sinks = ["e.jsonl?send=events", "f.jsonl"]
    with opened_run(load(None, {**keys, "ask": str(folder), "sinks": sinks})) as opened:
        assert all(run.join(LONG_S) for run in opened.controller.start())
    first, *_, last = [json.loads(line) for line in Path("e.jsonl").read_text().splitlines()]
    assert first["type"] == "begin"
    assert 0 < last["p_yes"] < 1
    assert last["answers"]["Is this person leaving?"] in ("yes", "no")
    assert last["sub_label"] == last["attributes"]["jacket"]
    assert last["sub_label"] in ("red", "grey")
    record = json.loads(Path("f.jsonl").read_text().splitlines()[-1])
    assert record["attributes"] == [{"track_id": last["tracks"][0], "jacket": last["sub_label"]}]


def test_a_model_that_cannot_answer_is_refused_at_once() -> None:
    keys = {"source": str(DEMO_CLIP), "rules": [{"name": "v", "when": "person", "verify": "Is it?"}]}
    opened = opened_run(load(None, keys))
    with pytest.raises(ConfigError, match="rule 'v' asks questions, which nano cannot answer"), opened:
        pass
