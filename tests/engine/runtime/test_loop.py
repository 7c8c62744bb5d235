"""The engine's steps against the plain loop: whatever shares a batch, however far ahead, the answers are the same."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.engine.core.admission import PagePool
from saccade.engine.core.request import Request, Sequence
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.errors import EngineClosedError, RequestTooLargeError
from saccade.engine.golden.reference import DenseCache, Generator
from saccade.engine.models.moondream.model import Moondream, load
from saccade.engine.models.moondream.prompts import CodePointTokenizer, MoondreamPrompts
from saccade.engine.models.protocol import ImageCrops
from saccade.engine.runtime.cpu_executor import CpuExecutor
from saccade.engine.runtime.loop import StepLoop
from saccade.engine.tasks.objects import BoxesOutput, DecodedObject, ObjectsOutput, PointsOutput
from saccade.engine.tasks.text_output import TextOutput
from tests.support.engine import GOLDEN, noise
from tests.support.engine.requests import request_of, sizes

PAGE = 16
WAIT_S = 60.0


class Rig:
    """A loop over a model, with what the tests want to request at."""

    def __init__(
        self, model: Moondream, depth: int, n_pages: int = 400, n_batch_slots: int = 24, together: int = 2
    ) -> None:
        pool = PagePool(n_pages)
        pool.allocate(1)
        prefix = model.config.text.prefix_attn
        config = replace(sizes(PAGE, n_batch_slots, together), depth=depth)
        self.scheduler: Scheduler[ImageCrops] = Scheduler(config, pool, prefix)
        self.loop = StepLoop(CpuExecutor(model, config, n_pages), self.scheduler, config)
        self.loop.start()
        self.ended: dict[Request[ImageCrops], BaseException | None] = {}

    def request(self, crops: ImageCrops, sequences: list[Sequence[ImageCrops]]) -> Request[ImageCrops]:
        return request_of(crops, sequences, self.ended.__setitem__)

    def wait(self, requests: list[Request[ImageCrops]]) -> None:
        deadline = time.monotonic() + WAIT_S
        while any(request not in self.ended for request in requests):
            assert time.monotonic() < deadline, "the loop stands still"
            time.sleep(0.002)

    def close(self) -> None:
        self.loop.close(EngineClosedError("closed"))
        assert self.scheduler.at_rest


@pytest.fixture(scope="module")
def tiny() -> Moondream:
    """In double precision: on noise two bins are often as likely as each other in float32, whose roundings differ.

    Not nano: convolutions in double precision take 2.7 s an image.
    """
    return load(GOLDEN, torch.device("cpu"), torch.float64)


@pytest.fixture(scope="module", params=[1, 2], ids=["blocking", "pipelined"])
def rig(tiny: Moondream, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(tiny, request.param)
    yield rig
    rig.close()


def crops_of(model: Moondream, image: np.ndarray) -> ImageCrops:
    return model.vision.make_crops(image)


def plainly(
    generator: Generator, prefix: DenseCache, ids: list[int], sized: bool, most: int, conf: float
) -> list[DecodedObject]:
    state = generator.prefill(prefix, [ids], most * (3 if sized else 2))
    return generator.objects(state, sized, [most], [conf])[0]


def alike(got: list[DecodedObject], wanted: list[DecodedObject]) -> bool:
    """Equal places; scores to rounding."""
    if [(one.x, one.y, one.width, one.height) for one in got] != [(w.x, w.y, w.width, w.height) for w in wanted]:
        return False
    return all(abs(a.score - b.score) < 1e-5 for a, b in zip(got, wanted, strict=True))


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
@example(seed=41194)  # two bins as likely as each other in float32
def test_requests_in_one_batch_answer_as_the_plain_loop(tiny: Moondream, rig: Rig, seed: int) -> None:
    dice, generator = random.Random(seed), Generator(tiny, tiny.config.tokenizer.eos_id)
    requests, wanted, dropped = [], [], set()
    for number in range(dice.randint(1, 4)):
        image = noise(40 + 8 * number, 60, seed % 1000 + number)
        prefix = generator.prefix(generator.image_tokens(image))
        answers, expected = [], []
        for _ in range(dice.randint(1, 4)):
            sized, most, conf = dice.random() < 0.6, dice.randint(1, 4), dice.choice([0.0, 0.02, 0.5])
            ids = [7 if sized else 8, dice.randint(10, 40), 3]
            answers.append(Sequence[ImageCrops](tuple(ids), (BoxesOutput if sized else PointsOutput)(most, conf, 60)))
            expected.append(plainly(generator, prefix, ids, sized, most, conf))
        requests.append(rig.request(crops_of(tiny, image), answers))
        wanted.append(expected)
    for request in requests:
        rig.loop.submit(request)
        time.sleep(dice.choice([0, 0, 0.01]))
        if dice.random() < 0.15:
            rig.loop.cancel(request, CancelledError())
            dropped.add(request)
    rig.wait(requests)
    for request, expected in zip(requests, wanted, strict=True):
        error = rig.ended[request]
        if error is not None:
            assert request in dropped
            continue
        for answer, found in zip(request.windows[0].sequences, expected, strict=True):
            assert isinstance(answer.output, ObjectsOutput)
            assert alike(answer.output.objects, found)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_golden_answers_hold_in_a_mixed_batch(depth: int) -> None:
    """All images, names, biases and texts of the golden set at once."""
    model = load(GOLDEN, torch.device("cpu"), torch.float32)
    prompts = MoondreamPrompts(model.config.tokenizer, CodePointTokenizer())
    cases = json.loads((GOLDEN / "cases.json").read_text())
    rig = Rig(model, depth, n_pages=1200, n_batch_slots=64)
    requests, checks = [], []
    for case in cases:
        with Image.open(GOLDEN / case["image"]) as file:
            crops = crops_of(model, np.asarray(file.convert("RGB")))
        answers: list[Sequence[ImageCrops]] = []
        for skill in ("detect", "point"):
            for name, by_bias in case[skill].items():
                for bias, objects in list(by_bias.items())[::3]:
                    conf = 1 / (1 + np.exp(-float(bias)))
                    answers.append(
                        Sequence(
                            tuple(prompts.objects(skill, name)),
                            (BoxesOutput if skill == "detect" else PointsOutput)(6, conf, 999),
                        )
                    )
                    checks.append((answers[-1], objects))
        for key, ids in (("query", prompts.query("how many?")), ("caption_short", prompts.caption("short"))):
            answers.append(Sequence(tuple(ids), TextOutput(model.config.tokenizer.eos_id, 24, 999)))
            checks.append((answers[-1], case[key]))
        requests.append(rig.request(crops, answers))
        rig.loop.submit(requests[-1])
    rig.wait(requests)
    rig.close()
    assert set(rig.ended.values()) == {None}
    for answer, objects in checks:
        if isinstance(answer.output, TextOutput):
            assert prompts.text(answer.output.tokens) == objects
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
            for one in answer.output.objects
        ]
        assert got == objects


def test_what_can_never_fit_fails_alone(tiny: Moondream) -> None:
    rig = Rig(tiny, 2, n_pages=76)
    crops = crops_of(tiny, noise(32, 32))
    huge = rig.request(crops, [Sequence((7, 10, 3), BoxesOutput(50, 0.0, 400)) for _ in range(4)])
    small = rig.request(crops, [Sequence((7, 10, 3), BoxesOutput(2, 0.0, 400))])
    rig.loop.submit(huge)
    rig.loop.submit(small)
    rig.wait([huge, small])
    rig.close()
    assert isinstance(rig.ended[huge], RequestTooLargeError)
    assert rig.ended[small] is None


def test_when_pages_are_short_requests_wait_for_their_turn(tiny: Moondream) -> None:
    rig = Rig(tiny, 2, n_pages=118)  # room for two requests at a time
    image = noise(32, 32)
    generator = Generator(tiny, tiny.config.tokenizer.eos_id)
    wanted = plainly(generator, generator.prefix(generator.image_tokens(image)), [7, 10, 3], True, 3, 0.0)
    requests = [rig.request(crops_of(tiny, image), [Sequence((7, 10, 3), BoxesOutput(3, 0.0, 400))]) for _ in range(6)]
    for request in requests:
        rig.loop.submit(request)
    rig.wait(requests)
    rig.close()
    for request in requests:
        output = request.windows[0].sequences[0].output
        assert isinstance(output, ObjectsOutput)
        assert alike(output.objects, wanted)


def test_an_error_on_the_stream_ends_its_requests_only(tiny: Moondream) -> None:
    rig = Rig(tiny, 2)
    crops = crops_of(tiny, noise(32, 32))
    bad = rig.request(crops, [Sequence((7, 10_000, 3), BoxesOutput(2, 0.0, 400))])  # no such token
    rig.loop.submit(bad)
    rig.wait([bad])
    good = rig.request(crops, [Sequence((7, 10, 3), BoxesOutput(2, 0.0, 400))])
    rig.loop.submit(good)
    rig.wait([good])
    rig.close()
    assert isinstance(rig.ended[bad], IndexError)
    assert rig.ended[good] is None
