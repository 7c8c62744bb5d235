from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine.models.moondream.region import size_bin, size_value
from saccade.engine.models.nano.detector_tower import CropDetections, DetectorTower
from saccade.engine.models.nano.picodet import Evidence
from tests.support.training import CLASSES, random_start, small_config
from training.answers import (
    Answerer,
    Answers,
    answer_losses,
    choose,
    judge,
    read_back,
    sequence_mask,
    similar_classes,
)
from training.augment import Batch
from training.import_picodet import convert
from training.train import build

CPU = torch.device("cpu")
CONFIG = small_config()
WORDS = torch.arange(10, 10 + len(CLASSES))
SIMILAR = similar_classes(CLASSES, CPU)
N_PROMPTS, N_OBJECTS, K = 4, 3, CONFIG.vision.n_places


def fresh() -> Answerer:
    torch.manual_seed(0)
    model, _ = build(CONFIG, convert(random_start(), CLASSES, 2), WORDS)
    return Answerer(model, N_PROMPTS, N_OBJECTS).requires_grad_(False)


def finds_of(rows: list[tuple[int, float, list[float]]]) -> CropDetections:
    """One view's finds (class, logit, box) and what fills them up."""
    spare = K - len(rows)
    boxes = torch.tensor([[box for _, _, box in rows] + [[0.0, 0.0, 0.1, 0.1]] * spare])
    labels = torch.tensor([[label for label, _, _ in rows] + [0] * spare])
    logits = torch.tensor([[logit for _, logit, _ in rows] + [-9.0] * spare])
    alive = torch.tensor([[True] * len(rows) + [False] * spare])
    return CropDetections(boxes, labels, logits, alive, torch.arange(K).unsqueeze(0), torch.zeros(1, K, 12))


def batch_of(boxes: list[tuple[int, bool, list[float]]], unknown: list[int] | None = None) -> Batch:
    """One view with boxes (class, sure, x1 y1 x2 y2)."""
    corners = torch.tensor([[box for _, _, box in boxes] or [[0.0] * 4]])
    low, high = corners.split(2, dim=-1)
    doubts = torch.zeros(1, len(CLASSES), dtype=torch.bool)
    doubts[0, unknown or []] = True
    return Batch(
        torch.zeros(1, 3, 8, 8),
        torch.cat([(low + high) / 2, high - low], dim=-1),
        torch.tensor([[label for label, _, _ in boxes] or [-1]]),
        torch.tensor([[sure for _, sure, _ in boxes] or [False]]),
        doubts,
    )


LEFT, RIGHT, NEAR = [0.1, 0.1, 0.4, 0.4], [0.6, 0.1, 0.9, 0.4], [0.12, 0.1, 0.4, 0.4]


def test_the_first_find_of_a_box_is_right_and_the_next_is_not() -> None:
    finds = finds_of([(0, 2.0, LEFT), (0, 1.0, NEAR), (0, 0.0, RIGHT), (2, 0.0, LEFT)])
    right, weight = judge(finds, batch_of([(0, True, LEFT)]))
    assert right[0, :4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert weight[0, :4].tolist() == [1.0] * 4


def test_a_doubtful_box_teaches_only_where_the_detector_is_sure() -> None:
    finds = finds_of([(0, 2.0, LEFT), (0, -2.0, RIGHT)])
    right, weight = judge(finds, batch_of([(0, False, LEFT), (0, False, RIGHT)]))
    assert right[0, :2].tolist() == [1.0, 0.0]
    assert weight[0, :2].tolist() == [0.5, 0.0]


def test_of_an_unknown_class_nothing_is_learned() -> None:
    finds = finds_of([(4, 2.0, LEFT), (0, 1.0, LEFT)])
    assert judge(finds, batch_of([(0, True, LEFT)], unknown=[4]))[1][0, :2].tolist() == [0.0, 1.0]


def test_answers_are_a_classs_finds_in_their_order() -> None:
    torch.manual_seed(0)
    finds = finds_of([(0, 2.0, LEFT), (2, 1.5, LEFT), (0, 1.0, RIGHT), (0, 0.5, NEAR), (0, 0.0, [0.0, 0.0, 0.2, 0.2])])
    batch = batch_of([(0, True, RIGHT), (2, True, LEFT)])
    answers = choose(finds, batch, SIMILAR, N_PROMPTS, N_OBJECTS, judge(finds, batch))
    asked = answers.classes[0].tolist()
    assert len(set(asked)) == N_PROMPTS
    assert {0, 2} <= set(asked[:-1])
    assert asked[-1] not in (0, 2)
    person = asked.index(0)
    assert answers.count[0, person] == N_OBJECTS  # of four
    wanted = [[0.25, 0.25, 0.3, 0.3], [0.75, 0.25, 0.3, 0.3], [0.26, 0.25, 0.28, 0.3]]
    assert torch.allclose(answers.boxes[0, person], torch.tensor(wanted), atol=1e-6)
    assert answers.right[0, person].tolist() == [0.0, 1.0, 0.0]
    assert answers.count[0, -1] == 0
    assert not answers.weight[0, -1].any()


def test_similar_classes_are_those_of_one_group() -> None:
    assert SIMILAR[CLASSES.index("car"), CLASSES.index("bus")]
    assert not SIMILAR[CLASSES.index("cat"), CLASSES.index("car")]
    assert torch.equal(SIMILAR, SIMILAR.T)
    assert similar_classes(("cat", "unicorn"), CPU).tolist() == [[True, False], [False, False]]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_a_prompt_sees_the_image_and_its_own_past(prefix: int, prompts: int, length: int) -> None:
    mask = sequence_mask(prefix, prompts, length)
    for row in range(prefix + prompts * length):
        group = (row - prefix) // length
        for column in range(prefix + prompts * length):
            own = row >= prefix and column >= prefix and (column - prefix) // length == group and column <= row
            assert mask[row, column] == (column < prefix or own)


def test_what_is_read_back_without_noise_is_the_nearest_bin() -> None:
    boxes = torch.rand(200, 4) * 0.9 + 0.05
    back = read_back(boxes, 0.0)
    assert torch.equal(back[:, :2], (boxes[:, :2] * 1024).round() / 1024)
    assert torch.equal(back[:, 2:], size_value(size_bin(boxes[:, 2:], 1024), 1024))
    assert torch.equal(read_back(back, 0.0), back)


def test_the_training_forward_is_the_models_own() -> None:
    """Hidden states for all prompts at once are those of one prompt after the other, answers read token by token."""
    answerer = fresh()
    model = answerer.model
    tokens = torch.randn(2, CONFIG.vision.n_tokens, CONFIG.text.dim)
    boxes = read_back(torch.rand(2, N_PROMPTS, N_OBJECTS, 4) * 0.5 + 0.2, 0.0)
    points = torch.tensor([[False, True, False, True], [True, False, False, True]])
    classes = torch.tensor([[0, 3, 2, 5], [1, 1, 4, 0]])
    hidden = answerer(tokens, WORDS[classes], points, boxes)
    assert hidden.shape == (2, N_PROMPTS, 3 * N_OBJECTS, CONFIG.text.dim)
    for view in range(2):
        for prompt in range(N_PROMPTS):
            point = bool(points[view, prompt])
            ids = torch.tensor([8 if point else 7, int(WORDS[classes[view, prompt]]), 3])
            x = [model.text.embed(torch.tensor([0])), tokens[view], model.text.embed(ids)]
            for cx, cy, w, h in boxes[view, prompt].tolist():
                x += [model.region.encode_coord(torch.tensor([[value]])) for value in (cx, cy)]
                if not point:
                    x.append(model.region.encode_size(torch.tensor([[w, h]])))
            one = torch.cat(x)[:-1].unsqueeze(0)
            alone = model.text(one, torch.arange(one.shape[1]).unsqueeze(0))[0, CONFIG.text.prefix_attn + 2 :]
            assert torch.allclose(hidden[view, prompt, : len(alone)], alone, atol=1e-3)


def test_a_wired_decoder_says_what_was_found() -> None:
    """Untrained: it begins with the first find of the class it is asked for, and says each box as it is."""
    answerer = fresh()
    tower = answerer.model.vision
    assert isinstance(tower, DetectorTower)
    torch.manual_seed(1)
    corners = torch.rand(1, K, 2) * 0.6
    boxes = torch.cat([corners, corners + torch.rand(1, K, 2) * 0.3 + 0.05], dim=-1)
    finds = CropDetections(
        boxes,
        torch.randint(0, 3, (1, K)),
        torch.linspace(3, -3, K).unsqueeze(0),
        torch.ones(1, K, dtype=torch.bool),
        torch.arange(K).unsqueeze(0),
        torch.zeros(1, K, 12),
    )
    seen = Evidence(
        torch.randn(1, 340, 96) * 0.1, torch.full((1, 340, len(CLASSES)), -4.0), boxes, torch.zeros(1, 96, 4, 4)
    )
    answers = choose(
        finds, batch_of([(0, True, LEFT)]), SIMILAR, N_PROMPTS, N_OBJECTS, (torch.ones(1, K), torch.ones(1, K))
    )
    answers.points[:] = False
    hidden = answerer(tower.tokens(seen, finds), WORDS[answers.classes], answers.points, read_back(answers.boxes, 0.0))
    region, near = answerer.model.region, []
    for prompt in range(N_PROMPTS):
        for number in range(int(answers.count[0, prompt])):
            cx, cy, w, h = answers.boxes[0, prompt, number].tolist()
            x, y, size = hidden[0, prompt, 3 * number : 3 * number + 3]
            if number == 0:
                near.append(abs(float(region.coord(x)) - cx) < 0.005)
            near.append(abs(float(region.coord(y)) - cy) < 0.005)
            near += [abs(a - b) < 0.02 * b + 0.002 for a, b in zip(region.size(size).tolist(), (w, h), strict=True)]
    assert len(near) > 20
    assert sum(near) / len(near) > 0.7


def losses_of(answerer: Answerer, hidden: torch.Tensor, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    shape = (1, N_PROMPTS, N_OBJECTS)
    values = {
        "classes": torch.arange(N_PROMPTS).unsqueeze(0),
        "points": torch.tensor([[False, True, False, False]]),
        "boxes": torch.rand(*shape, 4) * 0.5 + 0.2,
        "count": torch.tensor([[2, 1, 0, 0]]),
        "right": torch.ones(shape),
        "weight": torch.ones(shape),
    }
    return answer_losses(answerer, hidden, Answers(**(values | changes)), room=30)


def test_losses_score_each_choice_once() -> None:
    answerer, hidden = fresh(), torch.randn(1, N_PROMPTS, 3 * N_OBJECTS, CONFIG.text.dim)
    losses = losses_of(answerer, hidden)
    assert set(losses) == {"start", "x", "y", "w", "h", "off"}
    assert all(torch.isfinite(value) for value in losses.values())
    other = hidden.clone()  # what comes after the last object and its end is no choice
    other[:, 0, 7:] += 1
    other[:, 1, 3:] += 1
    other[:, 2:, 1:] += 1
    for name, value in losses_of(answerer, other).items():
        assert torch.allclose(value, losses[name], atol=1e-5), name
    for step, name in ((0, "start"), (6, "start"), (0, "x"), (4, "y"), (2, "w")):
        other = hidden.clone()
        other[:, 0, step] += torch.randn(CONFIG.text.dim)
        assert not torch.allclose(losses[name], losses_of(answerer, other)[name], atol=1e-5), (step, name)


def test_what_nobody_knows_teaches_no_score_but_is_copied() -> None:
    answerer, hidden = fresh(), torch.randn(1, N_PROMPTS, 3 * N_OBJECTS, CONFIG.text.dim)
    without = torch.zeros(1, N_PROMPTS, N_OBJECTS)
    losses = losses_of(answerer, hidden, weight=without)
    other = losses_of(answerer, hidden, weight=without, right=without)
    assert losses["start"] == other["start"]  # ends alone are left
    assert losses["x"] > 0
