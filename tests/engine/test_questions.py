"""Questions with choices, reasoning, parts of an image or none, encoded images, and gaze, through a real engine."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.engine import (
    AdapterError,
    Caption,
    Detect,
    Engine,
    EngineConfig,
    EngineError,
    Gaze,
    Point,
    PromptError,
    Query,
    RequestTooLargeError,
    Result,
    Text,
)
from saccade.engine.golden.reference import Generator, Prefilled
from saccade.engine.model_loader import open_model
from saccade.engine.tasks import TASKS
from tests.support.engine import TINY, noise, write_model

WAIT_S = 60
IMAGE = noise(30, 30)
CHOICES = ("yes", "no", "not at all")
SPELLINGS = ("yes", " yes", "Yes", " Yes", "no", " no", "No", " No", "not at all", " not at all", "Not at all")


@pytest.fixture(scope="module", params=[1, 2], ids=["blocking", "pipelined"])
def tiny(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(str(folder), "cpu", depth=request.param) as engine:
        yield engine


def ask(engine: Engine, task: Query, image: Any = IMAGE) -> Text:
    return engine.submit(image, [task]).result(WAIT_S).texts[0]


# Choices


@torch.inference_mode()
def mass(engine: Engine, question: str, spelling: str) -> float:
    """The probability that a drawn answer begins with a spelling: token by token, each behind a prefill of its own."""
    model, prompts = engine._loaded.model, engine._loaded.prompts
    generator = Generator(model, prompts.eos_id)
    prefix, total = generator.prefix(generator.image_tokens(IMAGE)), 0.0
    ids = prompts.ids(spelling)
    for n, token in enumerate(ids):
        logits = model.text.logits(generator.prefill(prefix, [[*prompts.query(question), *ids[:n]]], 0).hidden[0])
        if n:
            logits[list(model.limits.suppressed_ids)] = -math.inf
        total += float(logits.double().log_softmax(-1)[token])
    return math.exp(total)


def longest(engine: Engine) -> str:
    """A question that leaves no room behind its choices."""
    for length in range(engine.limits.max_context, 0, -1):
        with suppress(PromptError):
            ask(engine, Query("?" * length, choices=CHOICES))
            return "?" * length
    raise AssertionError("no question fits")


def test_choices_have_the_mass_of_their_spellings(tiny: Engine) -> None:
    for question in ("is it?", "is it longer than a page of the cache?", longest(tiny)):
        masses = {one: mass(tiny, question, one) for one in [*SPELLINGS, " Not at all"]}
        by_choice = {choice: sum(p for one, p in masses.items() if one.strip().lower() == choice) for choice in CHOICES}
        by_choice["no"] -= by_choice["not at all"]
        total = sum(by_choice.values())
        text = ask(tiny, Query(question, choices=CHOICES))
        assert text.probabilities == pytest.approx({choice: p / total for choice, p in by_choice.items()}, rel=1e-4)
        assert text.text == max(by_choice, key=lambda choice: by_choice[choice])


def test_choices_take_no_step_of_their_own(tiny: Engine) -> None:
    before = tiny.counters()
    text = ask(tiny, Query("is it?", choices=("yes", "no")))
    after = tiny.counters()
    assert set(text.probabilities or ()) == {"yes", "no"}
    assert sum((text.probabilities or {}).values()) == pytest.approx(1.0)
    assert after["steps_decode_total"] == before["steps_decode_total"]
    assert (after["pages_used"], after["batch_slots_used"]) == (before["pages_used"], 0)


def test_free_text_has_no_probabilities(tiny: Engine) -> None:
    assert ask(tiny, Query("is it?", 3)).probabilities is None


# Reasoning, parts of an image, no image


def test_reasoning_comes_before_the_answer(tiny: Engine) -> None:
    text = ask(tiny, Query("why?", 6, reasoning=True))
    assert text.reasoning is not None
    assert text.text
    assert ask(tiny, Query("why?", 6)).reasoning is None
    assert text.text != ask(tiny, Query("why?", 6)).text
    with tiny.stream(IMAGE, Query("why?", 6, reasoning=True)) as pieces:
        assert "".join(pieces) == text.text
    chosen = ask(tiny, Query("why?", 6, choices=("yes", "no"), reasoning=True))
    assert chosen.reasoning == text.reasoning
    assert chosen.text in ("yes", "no")


def test_reasoning_leaves_room_for_an_answer(tiny: Engine) -> None:
    text = ask(tiny, Query("why?", 768, reasoning=True))  # the context holds 79 tokens behind the image
    assert text.reasoning is not None
    assert text.text.count("<") + text.reasoning.text.count("<") <= 79


def test_a_model_that_has_not_learned_to_reason_says_so(tmp_path: Path) -> None:
    import dataclasses

    config = dataclasses.replace(TINY, tokenizer=dataclasses.replace(TINY.tokenizer, answer_id=4, thinking_id=3))
    with Engine.load(str(write_model(tmp_path / "old", config)), "cpu") as engine:
        with pytest.raises(PromptError, match="reason"):
            ask(engine, Query("why?", 6, reasoning=True))
        assert ask(engine, Query("why?", 6)).text


def test_what_a_question_is_about_changes_the_answer(tiny: Engine) -> None:
    refs = [((0.25, 0.75),), ((0.9, 0.1),), ((0.1, 0.2, 0.5, 0.6),), ((0.1, 0.2, 0.5, 0.9),), ()]
    assert len({ask(tiny, Query("what?", 8, refs=one)).text for one in refs}) == len(refs)  # type: ignore[arg-type]


def test_a_question_needs_no_image(tiny: Engine) -> None:
    alone = [ask(tiny, Query(f"why {n}?", 8), None).text for n in range(4)]
    assert len(set(alone)) > 1
    assert tiny.query(None, "why 1?", 8).text == alone[1]
    futures = [tiny.submit(None, [Query(f"why {n}?", 8)]) for n in range(4)]
    pictured = tiny.submit(IMAGE, [Query("why 1?", 8)])
    assert [future.result(WAIT_S).texts[0].text for future in futures] == alone
    assert pictured.result(WAIT_S).texts[0].text != alone[1]
    assert tiny._loop._scheduler.at_rest


def test_a_long_question_without_an_image_crosses_the_prefix(tiny: Engine) -> None:
    """Its positions run on where an image's prefix would end, in the middle of a page."""
    question = "a long question?" * 3
    whole = ask(tiny, Query(question, 20), None).text
    assert len(tiny._loaded.prompts.query(question)) > tiny.limits.prefix_length
    assert ask(tiny, Query(question, 7), None).text == "".join(f"<{token}>" for token in ids_of(whole)[:7])


def ids_of(text: str) -> list[int]:
    return [int(one) for one in text.strip("<>").split("><")]


@pytest.mark.parametrize("task", [Detect("x"), Point("x"), Caption(), Gaze((0.5, 0.5)), Query("?", refs=((0.1, 0.2),))])
def test_what_needs_an_image_says_so(tiny: Engine, task: Any) -> None:
    with pytest.raises(ValueError, match="image"):
        tiny.submit(None, [task])


@pytest.mark.parametrize(
    "wrong",
    [
        {"refs": ((0.1,),)},
        {"refs": ((0.1, 1.2),)},
        {"refs": (0.1, 0.2)},
        {"refs": ((0.5, 0.5, 0.4, 0.6),)},
        {"refs": 3},
        {"reasoning": "yes"},
    ],
)
def test_wrong_options_are_one_clear_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"ref|box|reasoning") as caught:
        Query("why?", **wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "question", "choices", "reasoning"),
    [
        ("Is it open?", "Is it open?", (), False),
        ("Is it open? [yes|no]", "Is it open?", ("yes", "no"), False),
        ("Why? [reasoning]", "Why?", (), True),
        ("Is it? [yes | not at all] [reasoning]", "Is it?", ("yes", "not at all"), True),
        ("What does [this] mean?", "What does [this] mean?", (), False),
        ("What is written in [x]", "What is written in [x]", (), False),
    ],
)
def test_a_typed_question_is_read_and_written(
    typed: str, question: str, choices: tuple[str, ...], reasoning: bool
) -> None:
    task = Query.parse(typed, 50, 0.5)
    assert (task.question, task.choices, task.reasoning) == (question, choices, reasoning)
    assert task.title == question
    assert Query.parse(task.asked, 50, 0.5) == task


@pytest.mark.parametrize("typed", ["Is it? [a|b] [c|d]", "Is it? [yes|]", "Why? [reasoning] [reasoning]"])
def test_a_typed_question_with_wrong_brackets_is_refused(typed: str) -> None:
    with pytest.raises(ValueError):
        Query.parse(typed, 50, 0.5)


# References


REFS = ((0.2, 0.3), (0.1, 0.4, 0.5, 0.8))


def by_hand(tiny: Engine, words: str) -> list[tuple[float, float]]:
    """Four points of the model's own modules: coordinates and a size stand behind the prefix, in front of a name."""
    model, prompts = tiny._loaded.model, tiny._loaded.prompts
    generator = Generator(model, prompts.eos_id)
    template = TINY.tokenizer.templates["point"]
    ids = torch.tensor([[*template["prefix"], 5, 5, 5, 5, 6, *prompts.ids(words), *template["suffix"]]])
    with torch.inference_mode():
        x, at = model.text.embed(ids), len(template["prefix"])
        for place, value in enumerate((0.2, 0.3, (0.1 + 0.5) / 2, (0.4 + 0.8) / 2)):
            x[0, at + place] = model.region.encode_coord(torch.tensor([value]))
        x[0, at + 4] = model.region.encode_size(torch.tensor([0.5 - 0.1, 0.8 - 0.4]))
        cache = generator.prefix(generator.image_tokens(IMAGE))
        prefix = tiny.limits.prefix_length
        positions = prefix + torch.arange(ids.shape[1]).unsqueeze(0)
        whole = cache.fork(1, prefix + ids.shape[1] + 8)
        hidden = model.text(x, positions, whole.upto(prefix + ids.shape[1]))
        state = Prefilled(hidden[:, -1], positions[:, -1] + 1, whole)
        (found,) = generator.objects(state, False, [4], [0.0])
    return [(one.x, one.y) for one in found]


def test_points_are_asked_for_among_references(tiny: Engine) -> None:
    points = tiny.point(IMAGE, "cat", 4, 0.0, REFS).points
    assert [(one.x, one.y) for one in points] == by_hand(tiny, " cat")
    assert points != tiny.point(IMAGE, "cat", 4, 0.0).points
    with pytest.raises(ValueError, match="a ref must be a point"):
        Point("cat", refs=((1.0,),))  # type: ignore[arg-type]


def test_a_model_that_knows_names_alone_takes_no_references() -> None:
    with Engine.load("nano", "cpu") as nano, pytest.raises(PromptError, match="does not support refs"):
        nano.point(IMAGE, "person", refs=REFS)


# Gaze


def test_gaze_is_asked_in_either_form(tiny: Engine) -> None:
    by_reference = tiny.submit(IMAGE, [Gaze((0.2, 0.3), 0.0, form="reference")]).result(WAIT_S).points.points
    asked = tiny.point(IMAGE, "gaze", 1, 0.0, ((0.2, 0.3),)).points
    assert by_reference == asked
    assert by_reference != tiny.submit(IMAGE, [Gaze((0.2, 0.3), 0.0)]).result(WAIT_S).points.points
    with pytest.raises(ValueError, match="the gaze form must be one of words, reference"):
        Gaze((0.2, 0.3), form="eyes")  # type: ignore[arg-type]


def test_gaze_is_a_point_or_nothing(tiny: Engine) -> None:
    found = [tiny.submit(IMAGE, [Gaze(eye, conf=0.0)]).result(WAIT_S).points.points for eye in ((0.2, 0.3), (0.9, 0.8))]
    assert [[spot.label for spot in one] for one in found] == [["gaze"], ["gaze"]]
    assert found[0] != found[1]
    assert tiny.submit(IMAGE, [Gaze((0.2, 0.3), conf=1.0)]).result(WAIT_S).points.points == ()
    assert TASKS["gaze"].parse("0.2,0.3", 50, 0.0) == Gaze((0.2, 0.3), 0.0)
    for wrong in ("", "0.2", "0.2,1.3", "a,b"):
        with pytest.raises(ValueError):
            TASKS["gaze"].parse(wrong, 50, 0.5)


def test_a_model_of_names_cannot_gaze() -> None:
    with Engine.load("nano", "cpu") as nano:
        assert nano.model.skills == ("detect", "point")


# Encoded images


def content(result: Result) -> object:
    """Everything but scores, which differ by rounding with what shares a batch."""
    boxes = [(box.x1, box.y1, box.x2, box.y2) for box in result.detections.boxes]
    return boxes, [(spot.x, spot.y) for spot in result.points.points], result.texts


TASKS_ASKED: list[Any] = [
    Detect("x", 3, 0.0),
    Point("y", 2, 0.0),
    Query("why?", 8),
    Query("why so?", 4, reasoning=True),
    Caption("short", 6),
]


def test_an_encoded_image_is_asked_as_the_image(tiny: Engine) -> None:
    images = [noise(30, 30, n) for n in range(3)] + [noise(50, 20, 3)]
    wanted = [content(tiny.submit(image, TASKS_ASKED).result(WAIT_S)) for image in images]
    encoded = [tiny.encode(image) for image in images]
    futures = [tiny.submit(one, TASKS_ASKED) for _ in range(2) for one in encoded]
    assert [content(future.result(WAIT_S)) for future in futures] == wanted * 2
    assert len(tiny.detect(encoded[0], "x", 3, 0.0)) == 3
    for one in encoded:
        one.close()
        one.close()
    tiny.counters()
    assert content(tiny.submit(images[0], TASKS_ASKED).result(WAIT_S)) == wanted[0]
    assert tiny._loop._scheduler.at_rest


def test_asking_an_encoded_image_encodes_nothing(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.encode(IMAGE) as encoded:
        wanted = ask(tiny, Query("why?", 8)).text
        vision = tiny._loaded.model.vision
        monkeypatch.setattr(type(vision), "features", lambda *_: pytest.fail("an image is encoded"))
        assert ask(tiny, Query("why?", 8), encoded).text == wanted


def test_what_is_asked_before_it_is_closed_is_answered(tiny: Engine) -> None:
    wanted = ask(tiny, Query("why?", 8)).text
    encoded = tiny.encode(IMAGE)
    futures = [tiny.submit(encoded, [Query("why?", 8)]) for _ in range(8)]
    encoded.close()
    assert {future.result(WAIT_S).texts[0].text for future in futures} == {wanted}
    with pytest.raises(EngineError, match="closed"):
        ask(tiny, Query("why?", 8), encoded)
    dropped = tiny.encode(IMAGE)
    cancelled = tiny.submit(dropped, [Query("why?", 8)])
    cancelled.cancel()
    del dropped
    gc.collect()
    assert ask(tiny, Query("why?", 8)).text == wanted
    assert tiny._loop._scheduler.at_rest


def test_encoded_images_take_no_more_than_half_of_the_pages(folder: Path) -> None:
    loaded, info, vocabulary = open_model(str(folder), "cpu", None)
    with Engine(loaded, info, vocabulary, EngineConfig(page_size=8, n_pages=16)) as engine:  # 3 pages an image
        kept = [engine.encode(noise(20, 20, n)) for n in range(2)]
        with pytest.raises(RequestTooLargeError, match="close some"):
            engine.encode(IMAGE)
        assert ask(engine, Query("why?", 8)).text
        kept.pop().close()
        engine.encode(IMAGE).close()
        kept.pop().close()
        assert ask(engine, Query("why?", 8)).text
        assert engine._loop._scheduler.at_rest


def test_an_encoded_image_is_of_its_engine_and_adapter(tiny: Engine, folder: Path) -> None:
    encoded = tiny.encode(IMAGE)
    with pytest.raises(ValueError, match="tiles"):
        tiny.submit(encoded, [Detect("x")], 2)
    with Engine.load(str(folder), "cpu") as other:
        with pytest.raises(ValueError, match="another engine"):
            other.submit(encoded, [Detect("x")])
        left = other.encode(IMAGE)
    left.close()  # its engine is closed: nothing happens
    with pytest.raises(EngineError, match="closed"):
        other.encode(IMAGE)
    with pytest.raises(AdapterError):
        tiny.encode(IMAGE, adapter="nobody")
    with pytest.raises(ValueError, match="uint8"):
        tiny.encode(IMAGE.astype(float))  # type: ignore[arg-type]
    encoded.close()


def test_a_forked_child_drops_an_encoded_image(tiny: Engine) -> None:
    encoded = tiny.encode(IMAGE)
    child = os.fork()
    if not child:
        encoded.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(tiny, Query("why?", 8), encoded).text
    encoded.close()
