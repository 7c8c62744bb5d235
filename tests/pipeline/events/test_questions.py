"""What rules ask, when, and what the answers do: a scripted model whose p(yes) is known at every moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from saccade.pipeline.events.machine import RuleMachine
from saccade.pipeline.events.questions import FRAME, Answer, Question
from saccade.pipeline.events.settings import RuleSettings
from tests.pipeline.events.scripted import scene

Steps = list[tuple[float, str]]
Asked = list[tuple[float, str, int]]


def run(
    settings: Mapping[str, Any],
    respond: Callable[[float, Question], float | str | None],
    seconds: float = 10,
    *,
    tracks: Callable[[float], Mapping[int, str]] = lambda t: {1: "person"},
    box: Callable[[float], tuple[float, float, float, float]] = lambda t: (0.4, 0.4, 0.6, 0.6),
    sharp: Callable[[float], float] = lambda t: 0.5,
    crossed: Callable[[float], Mapping[int, str]] = lambda t: {},
    delay_s: float = 1.0,
    step_s: float = 0.5,
) -> tuple[Steps, Asked, RuleMachine]:
    """Show a rule scenes, and have each question answered after a time: with p(yes), a text, or None for not at all."""
    machine = RuleMachine(RuleSettings.model_validate({"name": "rule", "when": "person", **settings}), "door")
    steps, asked, waiting = Steps(), Asked(), list[tuple[float, Answer]]()
    for number in range(round(seconds / step_s)):
        t = number * step_s
        for due, answer in list(waiting):
            if due <= t:
                machine.questions.take(answer)
                waiting.remove((due, answer))
        shown = scene(t, tracks(t), box=box(t), crossed={"gate": crossed(t)})
        object.__setattr__(shown, "sharpness", lambda track, t=t: sharp(t))
        steps += [(t, change.kind) for change in machine.step(shown)]
        for question in machine.due(shown):
            asked.append((t, question.name or question.kind, question.track))
            response = respond(t, question)
            if isinstance(response, float):
                text = "yes" if response >= 0.5 else "no"
                answer = Answer(question, text, {"yes": response, "no": 1 - response})
            else:
                answer = Answer(question, response)
            waiting.append((t + delay_s, answer))
    return steps, asked, machine


ASK = {"ask": "Is there a helmet?", "again": 1}


def over_time(*values: tuple[float, float]) -> Callable[[float, Question], float]:
    """p(yes) from each of these times on."""
    return lambda t, question: next(p for since, p in reversed(values) if t >= since)


def test_an_event_begins_with_the_answer() -> None:
    steps, asked, machine = run(ASK, lambda t, q: 0.9, 5)
    assert steps == [(1.0, "begin")]
    assert [t for t, _, _ in asked] == [0, 1, 2, 3, 4]
    assert machine.event is not None
    assert (machine.event.p_yes, machine.event.answers) == (0.9, {"Is there a helmet?": "yes"})


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([(0, 0.79)], []),
        ([(0, 0.8), (2, 0.41)], [(1.0, "begin"), (3.0, "update")]),  # still on
        ([(0, 0.8), (2, 0.4)], [(1.0, "begin"), (3.0, "end")]),
        ([(0, 0.8), (2, 0.4), (4, 0.79), (6, 0.8)], [(1.0, "begin"), (3.0, "end"), (7.0, "begin")]),
    ],
)
def test_hysteresis_on_p_yes(values: list[tuple[float, float]], steps: Steps) -> None:
    assert run(ASK, over_time(*values), 9)[0] == steps


def test_no_may_be_expected() -> None:
    settings = {**ASK, "expect": False, "threshold": {"on": 0.7, "off": 0.5}}  # as YAML reads `expect: no`
    steps, _, machine = run(settings, over_time((0, 0.9), (3, 0.3), (6, 0.5)), 9)
    assert steps == [(4.0, "begin"), (7.0, "end")]
    assert machine.event is None


def test_a_cooldown_holds_for_answers_too() -> None:
    answers = over_time((0, 0.9), (2, 0.1), (3, 0.9))
    assert run({**ASK, "cooldown": 4}, answers, 10)[0] == [(1.0, "begin"), (3.0, "end"), (7.0, "begin")]


def test_each_track_is_asked_about_by_itself() -> None:
    steps, asked, machine = run(
        ASK, lambda t, q: 0.9 if q.track == 2 else 0.1, 3, tracks=lambda t: {1: "person", 2: "person"}
    )
    assert steps == [(1.0, "begin")]
    assert machine.event is not None
    assert machine.event.tracks == (2,)
    assert {track for _, _, track in asked} == {1, 2}


def test_the_frame_may_be_asked_about_once_for_all() -> None:
    both = {1: "person", 2: "person"}
    steps, asked, machine = run({**ASK, "scope": "frame"}, lambda t, q: 0.9, 3, tracks=lambda t: both)
    assert steps == [(1.0, "begin")]
    assert asked == [(t, "ask", FRAME) for t in (0, 1, 2)]
    assert machine.event is not None
    assert machine.event.tracks == (1, 2)


def test_a_condition_without_tracks_asks_about_the_frame() -> None:
    settings = {**ASK, "when": "absent for 2s"}
    steps, asked, _ = run(settings, lambda t, q: 0.9, 5, tracks=lambda t: {})
    assert (steps, asked[0]) == ([(3.0, "begin")], (2.0, "ask", FRAME))


VERIFY = {"verify": "Is there really a person?"}


def test_verification_holds_an_event_back_and_is_remembered() -> None:
    steps, asked, _ = run(VERIFY, lambda t, q: 0.6, 20)
    assert (steps, asked) == ([(1.0, "begin")], [(0, "verify", 1)])


def test_what_is_not_verified_makes_no_event() -> None:
    steps, asked, _ = run(VERIFY, lambda t, q: 0.4, 20)
    assert (steps, asked) == ([], [(0, "verify", 1)])


@pytest.mark.parametrize(
    "better",
    [
        {"box": lambda t: (0.4, 0.4, 0.6, 0.6) if t < 4 else (0.4, 0.4, 0.65, 0.65)},
        {"sharp": lambda t: 0.5 if t < 4 else 0.66},
    ],
)
def test_it_is_verified_again_when_larger_or_sharper(better: dict[str, Any]) -> None:
    steps, asked, _ = run(VERIFY, lambda t, q: 0.4 if t < 4 else 0.9, 8, **better)
    assert (steps, asked) == ([(5.0, "begin")], [(0, "verify", 1), (4.0, "verify", 1)])


def test_nothing_is_asked_before_it_is_verified() -> None:
    _, asked, _ = run({**VERIFY, **ASK, "attributes": {"jacket": "Which colour?"}}, lambda t, q: 0.1, 5)
    assert asked == [(0, "verify", 1)]
    steps, asked, _ = run({**VERIFY, **ASK}, lambda t, q: 0.9, 3.5)
    assert (steps, [name for _, name, _ in asked]) == ([(2.0, "begin")], ["verify", "ask", "ask", "ask"])


JACKET = {"attributes": {"jacket": {"question": "Which colour?", "choices": ["red", "blue"]}, "hat": "Which hat?"}}


def test_attributes_are_asked_once_and_again_when_grown() -> None:
    sides = {0: 0.2, 3: 0.24, 6: 0.25}  # 1.44 and 1.56 times as large

    def box(t: float) -> tuple[float, float, float, float]:
        side = next(side for since, side in reversed(sides.items()) if t >= since)
        return 0.4, 0.4, 0.4 + side, 0.4 + side

    steps, asked, machine = run(JACKET, lambda t, q: f"{q.name} {t:g}", 9, box=box)
    assert asked == [(0, "jacket", 1), (0, "hat", 1), (6.0, "jacket", 1), (6.0, "hat", 1)]
    assert steps == [(0, "begin"), (1.0, "update"), (7.0, "update")]
    assert machine.questions.attributes(1) == {"jacket": "jacket 6", "hat": "hat 6"}
    assert machine.event is not None
    assert machine.event.attributes == {"jacket": "jacket 6", "hat": "hat 6"}


def test_a_model_that_is_away_is_asked_again() -> None:
    steps, asked, _ = run(ASK, lambda t, q: None if t < 5 else 0.9, 9)
    assert steps == [(7.0, "begin")]
    assert [t for t, _, _ in asked[:4]] == [0, 2, 4, 6]  # every 2 s while it is
    steps, _, _ = run(ASK, lambda t, q: None if t >= 1 else 0.9, 9)
    assert steps == [(1.0, "begin")]  # what it has answered holds


def test_an_answer_about_one_that_has_gone_is_dropped() -> None:
    steps, _, machine = run(ASK, lambda t, q: 0.9, 5, tracks=lambda t: {1: "person"} if t < 1 else {}, delay_s=3)
    assert (steps, machine.event) == ([], None)


CROSSES = {"when": "person crosses gate", "verify": "Is there really a person?"}


@pytest.mark.parametrize(
    ("settings", "answers", "there_s", "steps"),
    [
        (CROSSES, {"verify": 0.9}, 9, [(3.0, "begin"), (3.5, "end")]),
        (CROSSES, {"verify": 0.9}, 2.1, [(3.0, "begin"), (3.5, "end")]),  # it has gone before the answer
        (CROSSES, {"verify": 0.1}, 9, []),
        (CROSSES, {"verify": None}, 9, []),
        ({**CROSSES, **ASK}, {"verify": 0.9, "ask": 0.9}, 9, [(4.0, "begin"), (4.5, "end")]),
        ({**CROSSES, **ASK}, {"verify": 0.9, "ask": 0.1}, 9, []),
        ({**CROSSES, **ASK, "scope": "frame"}, {"verify": 0.9, "ask": 0.9}, 9, [(4.0, "begin"), (4.5, "end")]),
    ],
)
def test_a_crossing_waits_for_its_answers(
    settings: dict[str, Any], answers: dict[str, float | None], there_s: float, steps: Steps
) -> None:
    found, asked, machine = run(
        settings,
        lambda t, q: answers[q.kind],
        tracks=lambda t: {1: "person"} if t < there_s else {},
        crossed=lambda t: {1: "forward"} if t == 2 else {},
    )
    assert found == steps
    assert asked[0] == (2.0, "verify", 1)
    assert not machine.state.holds or answers["verify"] in (0.1, None)  # which may be asked again, and agree


@pytest.mark.parametrize(
    ("answer", "attributes", "kinds"), [("red", {"jacket": "red", "hat": "red"}, ["update"]), (None, {}, [])]
)
def test_a_crossing_lasts_until_its_attributes_are_known(
    answer: str | None, attributes: dict[str, str], kinds: list[str]
) -> None:
    settings = {"name": "rule", "when": "person crosses gate", **JACKET}
    machine = RuleMachine(RuleSettings.model_validate(settings), "door")
    crossing = scene(0, {1: "person"}, crossed={"gate": {1: "forward"}})
    assert [change.kind for change in machine.step(crossing)] == ["begin"]
    questions = machine.due(crossing)
    assert machine.step(scene(0.5, {1: "person"})) == []
    for question in questions:
        machine.questions.take(Answer(question, answer))
    assert [change.kind for change in machine.step(scene(1, {1: "person"}))] == kinds
    (end,) = machine.step(scene(1.5, {1: "person"}))
    assert (end.kind, end.event.attributes) == ("end", attributes)


def test_a_second_crossing_is_asked_about_anew() -> None:
    steps, _, _ = run(
        {**ASK, "when": "person crosses gate"},
        over_time((0, 0.9), (5, 0.1), (8, 0.9)),
        12,
        crossed=lambda t: {1: "forward"} if t in (2, 6, 9) else {},
    )
    assert steps == [(3.0, "begin"), (3.5, "end"), (10.0, "begin"), (10.5, "end")]


def test_an_answer_about_the_frame_does_not_hold_for_ever() -> None:
    steps, _, _ = run(
        {**ASK, "scope": "frame"},
        over_time((0, 0.9), (3, 0.1)),
        tracks=lambda t: {1: "person"} if t < 3 or t >= 6 else {},
    )
    assert steps == [(1.0, "begin"), (3.0, "end")]


def test_a_refused_question_is_due_again() -> None:
    machine = RuleMachine(RuleSettings.model_validate({"name": "rule", "when": "person", **ASK}), "door")
    for t in (0.0, 0.5):
        shown = scene(t, {1: "person"})
        machine.step(shown)
        (question,) = machine.due(shown)
        machine.questions.refuse(question)
    assert machine.due(scene(0.6, {1: "person"}, hidden=[1])) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": {"on": 0.3, "off": 0.4}}, r"must not be above the threshold `on` \(0\.3\)"),
        ({"expect": "perhaps"}, "'yes' or 'no'"),
        ({"attributes": {"a": {"choices": ["x"]}}}, "question"),
        ({"scope": "street"}, "'track' or 'frame'"),
    ],
)
def test_bad_questions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuleSettings.model_validate({"name": "rule", "when": "person", **settings})
