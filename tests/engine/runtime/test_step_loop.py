"""The engine's steps against the plain loop: whatever shares a batch, however far ahead, the answers are the same."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.engine.evaluation.reference import Generator
from saccade.engine.models.moondream.image_crops import make_crops
from saccade.engine.models.moondream.model import Moondream, load
from saccade.engine.models.moondream.prompts import CodePointCodec, Prompts
from saccade.engine.models.moondream.text import KVCache
from saccade.engine.runtime.cpu_executor import Crops, Executor
from saccade.engine.runtime.step_loop import StepLoop
from saccade.engine.scheduling.found import Found
from saccade.engine.scheduling.output_state import FindBoxes, FindObjects, FindPoints, WriteText
from saccade.engine.scheduling.page_pool import PagePool
from saccade.engine.scheduling.scheduler import Answer, Look, NeverFitsError, Scheduler
from tests.support.engine import GOLDEN, NANO, noise

PAGE = 16
WAIT_S = 60.0


class Rig:
    """A loop over a model, with what the tests want to look at."""

    def __init__(self, model: Moondream, depth: int, n_pages: int = 400, n_lanes: int = 24, together: int = 2) -> None:
        pool = PagePool(n_pages)
        pool.take(1)
        prefix = model.config.text.prefix_attn
        self.scheduler: Scheduler[Crops] = Scheduler(pool, PAGE, prefix, n_lanes, together)
        self.loop = StepLoop(Executor(model, depth, n_lanes, n_pages, PAGE), self.scheduler, depth)
        self.ended: dict[Look[Crops], BaseException | None] = {}

    def look(self, crops: Crops, answers: list[Answer[Crops]]) -> Look[Crops]:
        return Look(crops, answers, self.ended.__setitem__)

    def wait(self, looks: list[Look[Crops]]) -> None:
        deadline = time.monotonic() + WAIT_S
        while any(look not in self.ended for look in looks):
            assert time.monotonic() < deadline, "the loop stands still"
            time.sleep(0.002)

    def close(self) -> None:
        self.loop.close(RuntimeError("closed"))
        assert self.scheduler.at_rest


@pytest.fixture(scope="module")
def nano() -> Moondream:
    """In double precision: on noise two places are often as good as each other to a float32, whose roundings differ."""
    return load(NANO, torch.device("cpu"), torch.float64)


@pytest.fixture(scope="module", params=[1, 2], ids=["blocking", "pipelined"])
def rig(nano: Moondream, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(nano, request.param)
    yield rig
    rig.close()


def crops_of(model: Moondream, image: np.ndarray) -> Crops:
    return Crops(*make_crops(image, model.config.vision))


def plainly(generator: Generator, prefix: KVCache, ids: list[int], sized: bool, most: int, conf: float) -> list[Found]:
    state = generator.prefill(prefix, [ids], most * (3 if sized else 2))
    return generator.objects(state, sized, [most], [conf])[0]


def alike(got: list[Found], wanted: list[Found]) -> bool:
    """Equal places; scores to rounding."""
    if [(one.x, one.y, one.width, one.height) for one in got] != [(w.x, w.y, w.width, w.height) for w in wanted]:
        return False
    return all(abs(a.score - b.score) < 1e-5 for a, b in zip(got, wanted, strict=True))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
@example(seed=41194)  # two places as good as each other in float32
def test_a_crowd_of_looks_answers_as_the_plain_loop_does(nano: Moondream, rig: Rig, seed: int) -> None:
    dice, generator = random.Random(seed), Generator(nano)
    looks, wanted, dropped = [], [], set()
    for number in range(dice.randint(1, 4)):
        image = noise(40 + 8 * number, 60, seed % 1000 + number)
        prefix = generator.prefix(generator.image_tokens(image))
        answers, expected = [], []
        for _ in range(dice.randint(1, 4)):
            sized, most, conf = dice.random() < 0.6, dice.randint(1, 4), dice.choice([0.0, 0.02, 0.5])
            ids = [7 if sized else 8, dice.randint(10, 40), 3]
            answers.append(Answer[Crops](tuple(ids), (FindBoxes if sized else FindPoints)(most, conf, 60)))
            expected.append(plainly(generator, prefix, ids, sized, most, conf))
        looks.append(rig.look(crops_of(nano, image), answers))
        wanted.append(expected)
    for look in looks:
        rig.loop.add(look)
        time.sleep(dice.choice([0, 0, 0.01]))
        if dice.random() < 0.15:
            rig.loop.cancel(look, CancelledError())
            dropped.add(look)
    rig.wait(looks)
    for look, expected in zip(looks, wanted, strict=True):
        error = rig.ended[look]
        if error is not None:
            assert look in dropped
            continue
        for answer, found in zip(look.answers, expected, strict=True):
            assert isinstance(answer.skill, FindObjects)
            assert alike(answer.skill.found, found)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_golden_answers_hold_in_a_mixed_batch(depth: int) -> None:
    """All pictures, names, biases and texts of the golden set at once."""
    model = load(GOLDEN, torch.device("cpu"), torch.float32)
    prompts = Prompts(model.config.tokenizer, CodePointCodec())
    cases = json.loads((GOLDEN / "cases.json").read_text())
    rig = Rig(model, depth, n_pages=1200, n_lanes=64)
    looks, checks = [], []
    for case in cases:
        with Image.open(GOLDEN / case["image"]) as picture:
            crops = crops_of(model, np.asarray(picture.convert("RGB")))
        answers: list[Answer[Crops]] = []
        for skill in ("detect", "point"):
            for name, by_bias in case[skill].items():
                for bias, objects in list(by_bias.items())[::3]:
                    conf = 1 / (1 + np.exp(-float(bias)))
                    answers.append(
                        Answer(
                            tuple(prompts.objects(skill, name)),
                            (FindBoxes if skill == "detect" else FindPoints)(6, conf, 999),
                        )
                    )
                    checks.append((answers[-1], objects))
        for key, ids in (("query", prompts.query("how many?")), ("caption_short", prompts.caption("short"))):
            answers.append(Answer(tuple(ids), WriteText(model.config.tokenizer.eos_id, 24, 999)))
            checks.append((answers[-1], case[key]))
        looks.append(rig.look(crops, answers))
        rig.loop.add(looks[-1])
    rig.wait(looks)
    rig.close()
    assert set(rig.ended.values()) == {None}
    for answer, objects in checks:
        if isinstance(answer.skill, WriteText):
            assert prompts.text(answer.skill.tokens) == objects
            continue
        got = [
            {"x": one.x, "y": one.y}
            if not one.width
            else {
                "x_min": one.x - one.width / 2,
                "y_min": one.y - one.height / 2,
                "x_max": one.x + one.width / 2,
                "y_max": one.y + one.height / 2,
            }
            for one in answer.skill.found
        ]
        assert got == objects


def test_what_can_never_fit_fails_alone(nano: Moondream) -> None:
    rig = Rig(nano, 2, n_pages=40)
    crops = crops_of(nano, noise(32, 32))
    huge = rig.look(crops, [Answer((7, 10, 3), FindBoxes(50, 0.0, 400)) for _ in range(4)])
    small = rig.look(crops, [Answer((7, 10, 3), FindBoxes(2, 0.0, 400))])
    rig.loop.add(huge)
    rig.loop.add(small)
    rig.wait([huge, small])
    rig.close()
    assert isinstance(rig.ended[huge], NeverFitsError)
    assert rig.ended[small] is None


def test_when_pages_are_short_looks_wait_and_all_are_answered(nano: Moondream) -> None:
    rig = Rig(nano, 2, n_pages=45)  # room for two looks at a time
    image = noise(32, 32)
    generator = Generator(nano)
    wanted = plainly(generator, generator.prefix(generator.image_tokens(image)), [7, 10, 3], True, 3, 0.0)
    looks = [rig.look(crops_of(nano, image), [Answer((7, 10, 3), FindBoxes(3, 0.0, 400))]) for _ in range(6)]
    for look in looks:
        rig.loop.add(look)
    rig.wait(looks)
    rig.close()
    for look in looks:
        skill = look.answers[0].skill
        assert isinstance(skill, FindObjects)
        assert alike(skill.found, wanted)


def test_an_error_on_the_stream_ends_its_looks_only(nano: Moondream) -> None:
    rig = Rig(nano, 2)
    crops = crops_of(nano, noise(32, 32))
    bad = rig.look(crops, [Answer((7, 10_000, 3), FindBoxes(2, 0.0, 400))])  # no such token
    rig.loop.add(bad)
    rig.wait([bad])
    good = rig.look(crops, [Answer((7, 10, 3), FindBoxes(2, 0.0, 400))])
    rig.loop.add(good)
    rig.wait([good])
    rig.close()
    assert isinstance(rig.ended[bad], IndexError)
    assert rig.ended[good] is None
