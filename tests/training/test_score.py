from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade.engine import Box, Engine, EngineError
from tests.support.engine import SCREEN, label, noise, square, write_pack
from training.score import DEFAULT_CONF, Evaluation, _empty_rate, _score, _Sheet, evaluate, main

pytest.importorskip("pycocotools", reason="the extra `eval` is not installed")

SIZE = 100  # every sheet is an image of 100 × 100, so that boxes can be thought of in per cent
LEFT, RIGHT, BELOW = [0.0, 0.0, 20.0, 20.0], [60.0, 0.0, 80.0, 20.0], [0.0, 60.0, 20.0, 80.0]


def find(box: list[float], score: float, shift: float = 0.0) -> Box:
    x1, y1, x2, y2 = (value / SIZE for value in box)
    return Box("cat", score, x1 + shift / SIZE, y1, x2 + shift / SIZE, y2)


def sheet(sure: list[list[float]], found: list[Box], maybe: list[list[float]] | None = None) -> _Sheet:
    return _Sheet(sure, maybe or [], found, SIZE, SIZE)


def test_perfect_finds_score_one() -> None:
    sheets = [sheet([LEFT, RIGHT], [find(LEFT, 0.9), find(RIGHT, 0.6)]), sheet([BELOW], [find(BELOW, 0.7)])]
    score = _score("cat", sheets)
    assert (score.boxes, score.images) == (3, 2)
    assert (score.ap50, score.ap, score.precision, score.recall) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert score.empty is None


def test_no_finds_score_nothing() -> None:
    score = _score("cat", [sheet([LEFT], []), sheet([], [])])
    assert (score.ap50, score.ap, score.recall) == (0.0, 0.0, 0.0)
    assert score.precision is None
    assert score.empty == 1.0


def test_a_class_without_labels_has_no_ap() -> None:
    score = _score("cat", [sheet([], [find(LEFT, 0.9)]), sheet([], [])])
    assert (score.boxes, score.images) == (0, 2)
    assert (score.ap50, score.ap, score.precision, score.recall) == (None, None, None, None)
    assert score.empty == 0.5


def test_an_ap_worked_out_by_hand() -> None:
    # By falling score: right, wrong, right, wrong; two of three boxes are found.
    sheets = [
        sheet([LEFT, RIGHT], [find(LEFT, 0.9), find(BELOW, 0.8)]),
        sheet([BELOW], []),
        sheet([], [find(LEFT, 0.2)]),
    ]
    sheets[0].found.append(find(RIGHT, 0.7))
    score = _score("cat", sheets)
    # Precision is 1 up to recall 1/3 (levels 0.00–0.33: 34 of 101), then 2/3 up to 2/3 (0.34–0.66: 33), then 0.
    assert score.ap50 == pytest.approx((34 * 1.0 + 33 * 2 / 3) / 101)
    assert score.precision == pytest.approx(2 / 3)  # the find of score 0.2 is under the usual conf
    assert score.recall == pytest.approx(2 / 3)


def test_a_box_half_off_counts_at_the_overlaps_it_reaches() -> None:
    # Shifted by 3 of 20: IoU 17 / 23 = 0.739, enough for 0.50, 0.55, 0.60, 0.65 and 0.70 of the ten.
    score = _score("cat", [sheet([LEFT], [find(LEFT, 0.9, shift=3.0)])])
    assert score.ap50 == pytest.approx(1.0)
    assert score.ap == pytest.approx(0.5)
    assert _score("cat", [sheet([LEFT], [find(LEFT, 0.9, shift=8.0)])]).ap50 == 0.0  # 12 / 28


def test_two_finds_of_one_box_are_one_right_and_one_wrong() -> None:
    score = _score("cat", [sheet([LEFT, RIGHT], [find(LEFT, 0.9), find(LEFT, 0.8, shift=1.0), find(RIGHT, 0.7)])])
    assert score.precision == pytest.approx(2 / 3)
    assert score.recall == 1.0
    assert score.ap50 == pytest.approx((51 + 50 * 2 / 3) / 101)


def test_a_find_counts_once_its_conf_is_above_the_usual_one() -> None:
    sheets = [sheet([LEFT, RIGHT], [find(LEFT, DEFAULT_CONF + 0.01), find(RIGHT, DEFAULT_CONF - 0.01)])]
    score = _score("cat", sheets)
    assert (score.precision, score.recall) == (1.0, 0.5)
    assert score.ap50 == pytest.approx(1.0)


@pytest.mark.parametrize("score", [0.95, 0.6])
def test_a_doubtful_box_neither_rewards_nor_punishes(score: float) -> None:
    plain = _score("cat", [sheet([LEFT], [find(LEFT, 0.9)])])
    found = _score("cat", [sheet([LEFT], [find(LEFT, 0.9), find(RIGHT, score)], [RIGHT])])
    missed = _score("cat", [sheet([LEFT], [find(LEFT, 0.9)], [RIGHT])])
    for other in (found, missed):
        assert (other.boxes, other.ap50, other.ap) == (1, plain.ap50, plain.ap)
        assert (other.precision, other.recall) == (1.0, 1.0)


def test_a_crowd_swallows_several_finds_and_those_inside_it() -> None:
    crowd = [50.0, 0.0, 100.0, 50.0]
    inside = [find([50.0 + 10 * i, 0.0, 60.0 + 10 * i, 20.0], 0.9) for i in range(5)]
    score = _score("cat", [sheet([LEFT], [find(LEFT, 0.8), *inside], [crowd])])
    assert (score.ap50, score.precision, score.recall) == (pytest.approx(1.0), 1.0, 1.0)


def test_a_sure_box_inside_a_doubtful_one_is_still_wanted() -> None:
    wide = [0.0, 0.0, 50.0, 50.0]
    assert _score("cat", [sheet([LEFT], [find(LEFT, 0.8)], [wide])]).recall == 1.0
    assert _score("cat", [sheet([LEFT], [], [wide])]).recall == 0.0


def test_the_empty_rate_is_over_images_without_the_class() -> None:
    sheets = [
        sheet([], []),
        sheet([], [find(LEFT, 0.4)]),  # under the usual conf: empty
        sheet([], [find(LEFT, 0.8), find(RIGHT, 0.9)]),
        sheet([], [find(LEFT, 0.8)], [RIGHT]),  # doubtful: says nothing about emptiness
        sheet([LEFT], [find(LEFT, 0.8)]),
    ]
    assert _score("cat", sheets).empty == pytest.approx(2 / 3)
    assert _empty_rate([]) is None


def test_finds_are_matched_within_their_own_image() -> None:
    score = _score("cat", [sheet([LEFT], []), sheet([], [find(LEFT, 0.9)])])
    assert (score.ap50, score.precision, score.recall, score.empty) == (0.0, 0.0, 0.0, 0.0)


# The whole way, on nano


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    with Engine.load("nano", "cpu") as engine:
        yield engine


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def screen_box(nano: Engine) -> list[float]:
    (box,) = nano.detect(square(240, 320, SCREEN), "tv").boxes
    return [box.x1, box.y1, box.x2, box.y2]


def test_finding_exactly_the_labels_scores_one(nano: Engine, tmp_path: Path) -> None:
    box = screen_box(nano)
    pack = write_pack(
        tmp_path / "pack",
        ["tv", "dragon"],
        [
            (square(240, 320, SCREEN), label(1, boxes={"tv": [[*box, 1.0, "gt"]]})),
            (noise(120, 160), label(2)),
            (noise(120, 160), label(3, "train", boxes={"tv": [[0.1, 0.1, 0.2, 0.2, 1.0, "gt"]]})),
        ],
    )
    seen: list[tuple[int, int]] = []
    result = evaluate(nano, pack, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert result.images == 2
    (tv,) = result.classes  # 'dragon' is not asked of a model that does not know it
    assert (tv.name, tv.boxes, tv.images) == ("tv", 1, 2)
    assert (tv.ap50, tv.ap, tv.precision, tv.recall, tv.empty) == pytest.approx((1.0, 1.0, 1.0, 1.0, 1.0))
    assert (result.ap50, result.ap, result.empty) == pytest.approx((1.0, 1.0, 1.0))


def test_unknown_pairs_are_left_out_and_doubtful_ones_ignored(nano: Engine, tmp_path: Path) -> None:
    box = screen_box(nano)
    image = square(240, 320, SCREEN)
    pack = write_pack(
        tmp_path / "pack",
        ["tv", "cat"],
        [
            (image, label(1, boxes={"tv": [[*box, 1.0, "gt"]]})),
            (image, label(2, unknown=["tv", "cat"])),  # counted, it would be a wrong find
            (image, label(3, maybe={"tv": [[*box, 0.3]]})),  # this too
        ],
    )
    result = evaluate(nano, pack, progress=silent)
    tv, cat = result.classes
    assert (tv.images, tv.boxes, tv.precision, tv.ap50) == (2, 1, 1.0, pytest.approx(1.0))
    assert tv.empty is None
    assert (cat.images, cat.boxes, cat.ap50, cat.empty) == (2, 0, None, 1.0)
    assert result.ap50 == pytest.approx(1.0)
    assert evaluate(nano, pack, limit=1, progress=silent).images == 1
    one = json.loads(json.dumps(result.to_dict()))
    assert [entry["name"] for entry in one["classes"]] == ["tv", "cat"]


def test_a_find_on_an_image_without_the_class_lowers_the_score(nano: Engine, tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "pack", ["tv"], [(square(240, 320, SCREEN), label(1)), (noise(90, 90), label(2))])
    result: Evaluation = evaluate(nano, pack, progress=silent)
    assert result.empty == 0.5
    assert result.ap50 is None


def test_tiles_are_taken_along(nano: Engine, tmp_path: Path) -> None:
    box = screen_box(nano)
    pack = write_pack(
        tmp_path / "pack", ["tv"], [(square(240, 320, SCREEN), label(1, boxes={"tv": [[*box, 1.0, "gt"]]}))]
    )
    assert evaluate(nano, pack, progress=silent, tiles=2).classes[0].recall == 1.0


def remove(name: str) -> Any:
    return lambda pack: (pack / name).unlink()


@pytest.mark.parametrize(
    ("change", "split", "says"),
    [
        (remove("classes.txt"), "val", "classes.txt"),
        (remove("labels.jsonl.gz"), "val", "labels.jsonl.gz"),
        (remove("images-01.tar"), "val", "images-01.tar"),
        (lambda pack: None, "test", "no split 'test'; it has val"),
        (lambda pack: (pack / "labels.jsonl.gz").write_bytes(b"not gzip"), "val", "labels.jsonl.gz"),
        (lambda pack: (pack / "images-01.tar").write_bytes(b"not a tar"), "val", "images-01.tar"),
    ],
)
def test_a_folder_that_is_no_pack_is_one_line(nano: Engine, tmp_path: Path, change: Any, split: str, says: str) -> None:
    pack = write_pack(tmp_path / "pack", ["tv"], [(noise(20, 20), label(1))])
    change(pack)
    with pytest.raises(EngineError, match=says) as caught:
        evaluate(nano, pack, split, progress=silent)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["none"], "none"),
        ([".", "--dtype", "int4"], "bfloat16, float16, fp8"),
        ([".", "--model", "no such"], "no such"),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    given: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*given, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert err.count("\n") == 1


def test_a_pack_is_scored_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pack(tmp_path, ["tv"], [(square(240, 320, SCREEN), label(1))])
    assert main([str(tmp_path), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 1
    assert main([str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("class ")
