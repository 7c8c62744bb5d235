"""Outlines: the state machine by itself, and whole answers held to a slow implementation in float64 without a cache."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from saccade.engine import Detect, Engine, PromptError, Query, Result, Segment, UnsupportedTaskError
from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.prompts import CodePointTokenizer, MoondreamPrompts
from saccade.engine.models.protocol import PathTokens, Phase
from saccade.engine.outline import fill, parse_path, placed
from saccade.engine.results import Outline
from saccade.engine.tasks import TASKS
from saccade.engine.tasks.segment import PathWriter, SegmentOutput
from saccade.engine.tasks.task import Sampling
from tests.engine.test_outline import slowly_inside, slowly_read
from tests.support.engine import TINY_3, noise, one_thread, random_model, write_model
from tests.support.engine.material import DEVICES

SYMBOLS: dict[int, str | int] = {
    **dict(zip(range(21, 30), ("M", "L", "C", "Z", "-", "M", "L", "C", "Z"), strict=True)),  # some with a space
    **{30 + number: number for number in range(961)},
}
WORDS = {"cat": 1000, "dog": 1001, "red": 1002}
EOS, MAX_TOKENS = 0, 40
REFS = ((0.2, 0.3), (0.1, 0.4, 0.5, 0.8))
TOKENS = PathTokens(
    EOS,
    {token: symbol for token, symbol in SYMBOLS.items() if isinstance(symbol, str) and symbol != "-"},
    frozenset({25}),
    {token: symbol for token, symbol in SYMBOLS.items() if isinstance(symbol, int)},
    str,
)
CONFIG = dataclasses.replace(
    TINY_3,
    text=dataclasses.replace(TINY_3.text, vocab_size=1200, max_context=256),
    region=dataclasses.replace(TINY_3.region, reads="ln"),
    tokenizer=dataclasses.replace(
        TINY_3.tokenizer,
        templates={**TINY_3.tokenizer.templates, "segment": {"prefix": [1, 17, 2], "suffix": [3]}},
    ),
)


@pytest.fixture(scope="module")
def model() -> Moondream:
    """One whose paths end: the end token is as likely as a few others."""
    found = random_model(CONFIG)
    found.text.lm_head.bias[EOS] += 3.0
    for token in (22, 23, 27):  # fewer paths end at once
        found.text.lm_head.bias[token] += 2.0
    return found


@pytest.fixture(scope="module", params=DEVICES)
def engine(
    tmp_path_factory: pytest.TempPathFactory, model: Moondream, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", CONFIG, model)
    names = {token: f"Ġ{symbol}" if 26 <= token < 30 else str(symbol) for token, symbol in SYMBOLS.items()} | {
        number: word for word, number in WORDS.items()
    }
    vocabulary = {names.get(number, f"other{number}"): number for number in range(1200)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="other11"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Replace("Ġ", " ")
    tokenizer.save(str(folder / "tokenizer.json"))
    with one_thread(), Engine.load(str(folder), request.param, "float32") as engine:
        yield engine


def slowly(model: Moondream, image: np.ndarray, words: Sequence[int], refs: Any, grammar: bool) -> dict[str, Any]:
    """The whole answer, every step over the whole sequence, in float64."""
    double = copy.deepcopy(model).double()
    vision, text, region = double.vision, double.text, double.region
    text.cosine, text.sine = text.cosine.double(), text.sine.double()
    with torch.inference_mode():
        crops = vision.make_crops(image)
        features = vision.features(vision.normalize(torch.from_numpy(crops.pixels)))
        whole = crops.tiling == (1, 1)
        tokens = vision.project(features[0], features[0]) if whole else vision.join(features, crops.tiling)
        values = []
        for ref in refs:
            if len(ref) == 4:
                x1, y1, x2, y2 = ref
                values += [[(x1 + x2) / 2], [(y1 + y2) / 2], [x2 - x1, y2 - y1]]
            else:
                values += [[ref[0]], [ref[1]]]
        prompt = [1, 17, 2, *(5 if len(one) == 1 else 6 for one in values), *words, 3]
        encoded = text.embed(torch.tensor(prompt))
        for number, one in enumerate(values):
            encode = region.encode_coord if len(one) == 1 else region.encode_size
            encoded[3 + number] = encode(torch.tensor(one))
        rows = [text.embed(torch.tensor([0])), tokens, encoded]

        def last() -> torch.Tensor:
            x = torch.cat(rows).unsqueeze(0)
            return text(x, torch.arange(x.shape[1]).unsqueeze(0))[0, -1]

        box = []
        for _ in range(2):
            value = region.decode_coord(last()).argmax().item() / 1024
            box.append(value)
            rows.append(region.encode_coord(torch.tensor([value])).unsqueeze(0))
        bins = region.decode_size(last()).argmax(-1)
        size = torch.pow(2.0, bins.float() / 1023 * 10 - 10)
        rows.append(region.encode_size(size).unsqueeze(0))
        ids, ended = list[int](), False
        while len(ids) <= MAX_TOKENS:
            scores = text.logits(last())
            if grammar:
                for token in range(len(scores)):
                    if not follows([SYMBOLS[one] for one in ids], SYMBOLS.get(token, "end" if token == EOS else "?")):
                        scores[token] = -torch.inf
            elif ids:
                scores[3] = -torch.inf
            token = int(scores.argmax())
            if token == EOS:
                ended = True
                break
            ids.append(token)
            rows.append(text.embed(torch.tensor([token])))
    x, y, (width, height) = *box, size.tolist()
    corners = [min(1.0, max(0.0, one)) for one in (x - width / 2, y - height / 2, x + width / 2, y + height / 2)]
    return {"prompt": prompt, "ids": ids, "ended": ended, "box": corners}


def follows(symbols: Sequence[str | int], symbol: str | int) -> bool:
    """Whether a symbol may stand behind others in a path; counted from the start each time."""
    due, minus = None, False  # numbers still due; None where the path has not begun
    for one in symbols:
        minus = one == "-"
        if isinstance(one, int):
            due = (due or 0) - 1
        elif one != "-":
            due = {"M": 2, "L": 2, "C": 6, "Z": 0}[one]
    if due is None:
        return symbol == "M"
    if due:
        return isinstance(symbol, int) or (symbol == "-" and not minus)
    return symbol in ("M", "L", "C", "Z", "end")


def spelled(ids: Sequence[int]) -> str:
    """Path data of tokens: numbers pair up behind their command, in thousandths."""
    words, numbers, sign, command = list[str](), list[str](), 1, ""
    for token in ids:
        symbol = SYMBOLS[token]
        if symbol == "-":
            sign = -1
        elif isinstance(symbol, int):
            numbers.append(f"{sign * symbol / 960:.3f}")
            sign = 1
            if len(numbers) == 2:
                words += [*([command] if command else []), *numbers]
                numbers, command = [], ""
        else:
            numbers, command = [], symbol
            if symbol == "Z":
                words.append("Z")
    return " ".join(words)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("refs", [(), REFS])
def test_answers_are_those_of_the_slow_implementation(
    engine: Engine, model: Moondream, seed: int, refs: tuple[Any, ...]
) -> None:
    image, name = noise(30 + seed, 45, seed), ["cat", "dog", "red cat"][seed % 3]
    wanted = slowly(model, image, [WORDS[word] for word in name.split()], refs, grammar=True)
    assert engine._loaded.prompts.segment(name, refs) == wanted["prompt"]
    found = engine.segment(image, name, refs, max_tokens=MAX_TOKENS)
    assert found.box == pytest.approx(wanted["box"], abs=1e-6)
    assert found.path == spelled(wanted["ids"][: MAX_TOKENS + 1])
    assert found.complete == wanted["ended"]
    assert not found.refined
    assert found.label == name


def test_answers_of_the_set_end_unless_they_are_cut(engine: Engine) -> None:
    found = [
        engine.segment(noise(30 + seed, 45, seed), name, refs, max_tokens=MAX_TOKENS)
        for seed in range(6)
        for name in ("cat", "dog", "red cat")
        for refs in ((), REFS)
    ]
    assert all(one.complete for one in found)
    assert len({one.path for one in found}) > 2
    assert not engine.segment(noise(30, 45), "cat", max_tokens=2).complete


def test_without_the_grammar_an_answer_ends_where_it_is_no_path(engine: Engine, model: Moondream) -> None:
    for seed in range(3):
        image = noise(30, 45, seed)
        wanted = slowly(model, image, [WORDS["cat"]], (), grammar=False)
        found = engine.segment(image, "cat", grammar=False, max_tokens=MAX_TOKENS)
        assert found.box == pytest.approx(wanted["box"], abs=1e-6)
        symbols = [SYMBOLS.get(token, "?") for token in wanted["ids"]]
        path = all(follows(symbols[:number], one) for number, one in enumerate([*symbols, "end"]))
        assert found.complete == (wanted["ended"] and path)


def test_outlines_share_a_batch_with_other_tasks(engine: Engine) -> None:
    image = noise(40, 50, 3)
    tasks = [Segment("cat", max_tokens=20), Detect("cat", 4, 0.0), Query("cat", 9), Segment("dog", max_tokens=9)]
    alone = [engine.submit(image, [task]).result(60) for task in tasks]
    for result in [engine.submit(image, tasks) for _ in range(3)]:
        together: Result = result.result(60)
        assert together.segments == (*alone[0].segments, *alone[3].segments)
        assert [box.pixels(1, 1) for box in together.detections.boxes] == [
            box.pixels(1, 1) for box in alone[1].detections.boxes
        ]
        assert together.texts == alone[2].texts


def test_a_stream_has_the_box_and_then_the_path(engine: Engine) -> None:
    with engine.stream(noise(30, 45, 1), Segment("cat", max_tokens=MAX_TOKENS)) as stream:
        first, *pieces = stream
        (outline,) = stream.result.segments
    assert tuple(json.loads(first).values()) == outline.box
    assert "".join(pieces) == outline.path


def test_a_drawn_outline_is_still_a_path(engine: Engine) -> None:
    image = noise(30, 45, 1)
    found = [engine.segment(image, "cat", temperature=2.0, seed=seed, max_tokens=30) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert all(parse_path(one.path)[0] is not None for one in found)


def test_what_cannot_outline_says_so_in_one_line(tmp_path: Path) -> None:
    with Engine.load("nano", "cpu") as nano:
        with pytest.raises(
            UnsupportedTaskError, match="nano can detect and point, not segment; load a Moondream"
        ) as one:
            nano.segment(noise(30, 45), "person")
        assert "\n" not in str(one.value)
    config = dataclasses.replace(CONFIG, text=dataclasses.replace(CONFIG.text, vocab_size=400))
    with (
        Engine.load(str(write_model(tmp_path / "tiny", config)), "cpu") as wordless,
        pytest.raises(PromptError, match="no tokens for SVG paths"),
    ):
        wordless.segment(noise(30, 45), "cat")


def test_moondream_3_has_a_template_for_outlines() -> None:
    published = MoondreamConfig.from_dict({"text": {"moe": {}}})
    prompts = MoondreamPrompts(published.tokenizer, CodePointTokenizer())
    assert prompts.segment("cat") == [1, 17374, 2, *prompts.ids("cat"), 3]
    assert prompts.segment("cat", REFS) == [1, 17374, 2, 5, 5, 5, 5, 6, *prompts.ids("cat"), 3]
    assert prompts.can("segment")
    assert not MoondreamPrompts(MoondreamConfig().tokenizer, CodePointTokenizer()).can("segment")
    without = {"templates": {**MoondreamConfig().tokenizer.templates, "segment": None}}
    config = MoondreamConfig.from_dict({"text": {"moe": {}}, "tokenizer": without})
    assert not MoondreamPrompts(config.tokenizer, CodePointTokenizer()).can("segment")


# The state machine


def walk(choose: Any, grammar: bool, steps: int = 60) -> SegmentOutput:
    output = SegmentOutput(TOKENS, 50, steps, grammar, Sampling())
    over = output.steps == 0
    while not over:
        phase = output.next_phase()
        if phase is Phase.LATER_TOKEN:
            over = output.commit((float(choose(output.rule().allowed)), 0.0, 0.0))
        else:
            over = output.commit((0.5, 0.25, 0.0))
    return output


def test_coordinates_and_a_size_are_forced() -> None:
    output = SegmentOutput(TOKENS, 50, 60, True, Sampling())
    phases = [output.next_phase() for _ in range(5)]
    assert phases == [Phase.Y, Phase.Y, Phase.SIZE, Phase.LATER_TOKEN, Phase.LATER_TOKEN]
    assert SegmentOutput(TOKENS, 50, 3, True, Sampling()).steps == 0
    assert SegmentOutput(TOKENS, 50, 10, True, Sampling()).steps == 10


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_whatever_the_grammar_allows_is_a_path(seed: int) -> None:
    dice = random.Random(seed)
    output = walk(lambda allowed: dice.choice(allowed), grammar=True)
    polygons, good = parse_path(output.writer.text)
    assert not output.writer.broken
    assert good or not output.complete
    assert polygons is not None


def test_200_random_answers_are_what_the_slow_implementation_reads_in_them() -> None:
    """From sampled numbers to box, path, polygons and mask: equal pixels, and at the usual tolerance nearly so."""
    dice, alike = random.Random(3), list[float]()
    pool = [EOS, *range(21, 30), *range(30, 991, 24)]
    likelier = {22: 4, 23: 2, 24: 1, 21: 1, 27: 4, 28: 2, 29: 1, 26: 1, EOS: 1}
    for _ in range(200):
        ids, x, y, width, height = list[int](), *(dice.random() for _ in range(4))
        output = SegmentOutput(TOKENS, 70, 90, True, Sampling())
        for values in ((x, 0.0, 0.0), (y, 0.0, 0.0), (width, height, 0.0)):
            output.next_phase()
            assert not output.commit(values)
        over = False
        while not over:
            output.next_phase()
            symbols = [SYMBOLS[one] for one in ids]
            fits = [token for token in pool if follows(symbols, SYMBOLS.get(token, "end"))]
            assert fits == [token for token in pool if token in set(output.rule().allowed or ())]
            fits = [EOS] if EOS in fits and len(ids) > 40 else fits
            token = dice.choices(fits, [likelier.get(one, 1) for one in fits])[0]
            over = output.commit((float(token), 0.0, 0.0))
            ids += [token] * (token != EOS)
        corners = [min(1.0, max(0.0, one)) for one in (x - width / 2, y - height / 2, x + width / 2, y + height / 2)]
        assert output.box == pytest.approx(corners, abs=1e-12)
        assert output.writer.text == spelled(ids)
        outline = Outline("x", output.writer.text, output.box, True)
        text = outline.path
        assert output.complete
        slow = [
            [(corners[0] + a * (corners[2] - corners[0]), corners[1] + b * (corners[3] - corners[1])) for a, b in ring]
            for ring in slowly_read(text)
        ]
        wanted = np.array([[slowly_inside(slow, (i + 0.5) / 23, (j + 0.5) / 17) for i in range(23)] for j in range(17)])
        exact = fill(placed(parse_path(text, 1e-12)[0], output.box), 23, 17)  # curves in 64 pieces, too
        assert np.array_equal(exact, wanted), text
        usual = outline.mask(23, 17)
        alike.append(1.0 if not (usual | wanted).any() else float((usual & wanted).sum() / (usual | wanted).sum()))
    assert np.mean(alike) > 0.98
    assert sum(one == 1.0 for one in alike) > 150


@given(st.lists(st.sampled_from([*range(3), 25, *range(21, 35), 500, 990, 1000, 1100]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_whatever_is_sampled_ends_with_what_was_good(tokens: list[int]) -> None:
    left = iter([*tokens, EOS])
    output = walk(lambda allowed: next(left, EOS), grammar=False)
    assert parse_path(output.writer.text)[0] is not None
    assert output.box == (0.375, 0.5, 0.625, 0.5) or output.box[0] <= output.box[2]


@pytest.mark.parametrize(
    ("symbols", "text", "broken", "unfinished"),
    [
        (("M", 0, 480, "L", 960, 0, "Z"), "M 0.000 0.500 L 1.000 0.000 Z", False, False),
        (("M", "-", 96, 0), "M -0.100 0.000", False, False),
        (("M", 1, 2, 3, "L", 960, 960), "M 0.001 0.002 L 1.000 1.000", False, False),  # an odd number is dropped
        ((480, "M"), "", True, False),
        (("M", 0, 0, "Z", 5), "M 0.000 0.000 Z", True, False),
        (("M", 0, 0, None, "Z"), "M 0.000 0.000", True, False),
        (("M", "-", "L"), "", True, True),
        (("M", 0, 0, "L"), "M 0.000 0.000", False, True),
    ],
)
def test_symbols_are_written_as_a_path(symbols: Any, text: str, broken: bool, unfinished: bool) -> None:
    writer = PathWriter()
    pieces = [writer.add(symbol) for symbol in symbols]
    assert (writer.text, writer.broken, writer.unfinished) == (text, broken, unfinished)
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    "wrong", [{"object": ""}, {"refs": ((1,),)}, {"max_tokens": -1}, {"temperature": -1}, {"top_p": 0}, {"seed": "x"}]
)
def test_wrong_options_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        Segment(**{"object": "cat", **wrong})
    assert "\n" not in str(caught.value)
    assert TASKS["segment"].parse("red cat", 50, 0.5) == Segment("red cat")
