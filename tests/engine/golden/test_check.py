from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.engine import Engine, EngineError, Gaze, ModelFilesError
from saccade.engine.golden.check import check
from saccade.engine.golden.check_engine import read_image
from tests.support import REPO
from tests.support.engine import GOLDEN, GOLDEN_3, one_thread, write_golden_case

EXACT = {"tiling", "crops", "boxes", "points", "texts"}
CLOSE = {"image embeddings", "hidden states", "logits"}
ENGINE = {"engine boxes", "engine points", "engine texts"}


def failing(folder: Path, tolerance: float = 1e-4) -> set[str]:
    """What the plain loop disagrees on."""
    return {quantity.name for quantity in check(folder, tolerance=tolerance, through_engine=False) if not quantity.ok}


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """The first golden case alone, to be tampered with."""
    return write_golden_case(tmp_path / "golden")


def alter_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def alter_case(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    change(cases[0])
    (folder / "cases.json").write_text(json.dumps(cases))


def test_the_model_reproduces_the_reference() -> None:
    quantities = check(GOLDEN)
    assert {quantity.name for quantity in quantities} == EXACT | CLOSE | ENGINE
    for quantity in quantities:
        allowed = 0.0 if quantity.name in EXACT else 1e-6 if quantity.name in ENGINE else 1e-4
        assert quantity.compared > 0
        assert quantity.worst <= allowed, (quantity.name, quantity.where)
        assert quantity.ok


def shared(name: str) -> Path:
    folder = REPO.parent / "shared" / "golden" / name
    if not folder.is_dir():
        pytest.skip(f"the golden set ../shared/golden/{name} is not on this machine; tests/data has a part of it")
    return folder


def test_the_whole_shared_set_is_reproduced() -> None:
    assert failing(shared("moondream-tiny")) == set()


def test_the_engine_answers_as_the_reference() -> None:
    quantities = {quantity.name: quantity for quantity in check(shared("moondream-talk"))}
    assert set(quantities) == {"prompt ids", *ENGINE, "reasoning texts", "reasoning points", "stopped sooner"}
    assert all(quantity.ok for quantity in quantities.values())
    assert quantities["prompt ids"].compared == 87
    assert quantities["engine texts"].compared == 63
    assert quantities["stopped sooner"].differing == 4
    assert quantities["reasoning points"].compared == 6


GAZES = [  # of the reference's `detect_gaze`, run in float32, which goes on where the end is not the likeliest token
    (0, (0.25, 0.75), (0.26953125, 0.712890625)),
    (0, (0.5, 0.125), (0.26953125, 0.9619140625)),
    (2, (0.5, 0.125), (0.7861328125, 0.94921875)),
    (2, (0.8, 0.3), (0.34765625, 0.9619140625)),
    (5, (0.25, 0.75), (0.501953125, 0.951171875)),
]


def test_gazes_are_those_of_the_reference() -> None:
    folder = shared("moondream-talk")
    with Engine.load(str(folder), "cpu") as engine:
        for number, eye, wanted in GAZES:
            image = read_image(folder / "images" / f"{number}.png")
            (spot,) = engine.submit(image, [Gaze(eye, conf=0.0)]).result(60).points.points
            assert (spot.x, spot.y) == wanted


def test_moondream_3_reproduces_its_reference_from_shards() -> None:
    quantities = {quantity.name: quantity for quantity in check(GOLDEN_3)}
    assert set(quantities) == (EXACT - {"crops"}) | {"crops"} | CLOSE | ENGINE | {"prompt ids"}
    assert {name: quantity.where for name, quantity in quantities.items() if not quantity.ok} == {}
    assert quantities["hidden states"].worst <= 3e-4
    assert min(quantities["engine texts"].compared, quantities["prompt ids"].compared) >= 6


def test_a_set_that_says_what_the_heads_read_is_checked_so(tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN_3, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["config"]["region"]["reads"]
    (folder / "config.json").write_text(json.dumps(config))
    assert failing(folder, 3e-4) == {"boxes", "points"}
    (folder / "checks.json").write_text(json.dumps({"region": "vllm"}))
    assert failing(folder, 3e-4) == set()


@pytest.mark.parametrize("reads", ["raw", "ln"])
def test_region_heads_read_what_the_config_says(tmp_path: Path, reads: str) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN_3, folder)
    config = json.loads((folder / "config.json").read_text())
    config["config"]["region"]["reads"] = reads
    (folder / "config.json").write_text(json.dumps(config))
    assert failing(folder, 3e-4) == {"boxes", "points"}
    alter_case(folder, lambda case: case.update(case["other_region"][reads]))
    assert failing(folder, 3e-4) == set()


@pytest.mark.parametrize(
    ("tensor", "broken"),
    [
        ("vision.blocks.13.attn.qkv.weight", "image embeddings"),
        ("vision.pos_emb", "image embeddings"),
        ("vision.proj_mlp.fc2.bias", "image embeddings"),
        ("text.blocks.2.mlp.fc1.weight", "hidden states"),
        ("text.post_ln.weight", "logits"),
        ("text.lm_head.bias", "logits"),
        ("region.coord_decoder.fc2.bias", "boxes"),
        ("region.size_decoder.fc2.bias", "boxes"),
    ],
)
def test_one_changed_weight_is_noticed_where_it_first_shows(one: Path, tensor: str, broken: str) -> None:
    order = ["image embeddings", "hidden states", "logits", "boxes"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.{tensor}"].view(-1)[5] += 1000.0

    alter_tensors(one / "model.safetensors", change)
    wrong = failing(one)
    assert broken in wrong
    assert not wrong & set(order[: order.index(broken)])
    assert not wrong & {"tiling", "crops"}


def test_points_depend_on_the_coordinate_head_not_on_sizes(one: Path) -> None:
    for head, wrong in (("size", {"boxes"}), ("coord", {"boxes", "points"})):
        name = f"model.region.{head}_decoder.fc2.bias"
        alter_tensors(one / "model.safetensors", lambda tensors, name=name: tensors[name][9:10].add_(1000.0))
        assert failing(one) == wrong


@pytest.mark.parametrize(
    ("array", "quantity", "by"),
    [
        ("0.image_embeddings", "image embeddings", 1e-3),
        ("0.detect_prefill_hidden", "hidden states", 1e-3),
        ("0.query_prefill_logits", "logits", 1e-3),
        ("0.crops_mean", "crops", 1e-6),
        ("0.crop_last", "crops", 1),
    ],
)
def test_one_changed_number_of_an_array_fails_its_quantity_alone(
    one: Path, array: str, quantity: str, by: float
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[array].view(-1)[1] += by

    alter_tensors(one / "arrays.safetensors", change)
    (wrong,) = (found for found in check(one, through_engine=False) if not found.ok)
    assert wrong.name == quantity
    assert wrong.worst == pytest.approx(by, rel=0.1)
    assert wrong.where == "images/0.png"


def test_an_array_that_is_not_a_number_fails(one: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["0.image_embeddings"][-1, -1] = torch.nan

    alter_tensors(one / "arrays.safetensors", change)
    assert failing(one) == {"image embeddings"}


def test_an_array_of_another_shape_fails(one: Path) -> None:
    alter_tensors(
        one / "arrays.safetensors",
        lambda tensors: tensors.update({"0.image_embeddings": tensors["0.image_embeddings"][:-1].clone()}),
    )
    assert failing(one) == {"image embeddings"}


def one_more(case: dict[str, Any], output: str) -> None:
    case[output]["person"]["-8.0"].append(case[output]["person"]["-8.0"][0])


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        (lambda case: case["detect"]["person"]["-8.0"][3].update(y_max=0.123), "boxes"),
        (lambda case: case["detect"]["person"]["-8.0"][3].update(y_max=float("nan")), "boxes"),
        (lambda case: case["detect"]["red car"]["-2.0"].pop(), "boxes"),
        (lambda case: one_more(case, "detect"), "boxes"),
        (lambda case: case["detect"]["person"]["-8.0"].reverse(), "boxes"),
        (lambda case: case["point"]["person"]["-8.0"][5].update(x=0.5), "points"),
        (lambda case: one_more(case, "point"), "points"),
        (lambda case: case.update(query=case["query"] + "<1>"), "texts"),
        (lambda case: case.update(caption_short=""), "texts"),
        (lambda case: case.update(tiling=[2, 2]), "tiling"),
        (lambda case: case.update(crops=3), "tiling"),
    ],
)
def test_one_changed_answer_fails_its_quantity_alone(
    one: Path, change: Callable[[dict[str, Any]], None], quantity: str
) -> None:
    alter_case(one, change)
    assert failing(one) == {quantity}


def test_the_smallest_step_of_a_box_is_noticed(one: Path) -> None:
    def change(case: dict[str, Any]) -> None:
        case["detect"]["person"]["-8.0"][0]["x_min"] += 2**-20

    alter_case(one, change)
    (wrong,) = (found for found in check(one, through_engine=False) if not found.ok)
    assert wrong.worst == pytest.approx(2**-20)
    assert wrong.where == "images/0.png detect 'person' at -8.0"


def test_another_image_fails_by_its_name(one: Path) -> None:
    shutil.copyfile(one / "images" / "1.png", one / "images" / "0.png")
    quantities = {quantity.name: quantity for quantity in check(one, through_engine=False)}
    assert not quantities["crops"].ok
    assert quantities["crops"].where == "images/0.png"


def test_the_tolerance_is_the_callers(one: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["0.image_embeddings"] += 1e-2

    alter_tensors(one / "arrays.safetensors", change)
    assert failing(one, 0.1) == set()
    assert failing(one, 1e-3) == {"image embeddings"}


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.vision.proj_mlp.fc2.bias"][0] = torch.nan


def test_another_dtype_is_shown_and_required_to_be_numbers_alone(one: Path) -> None:
    exact = {quantity.name: quantity for quantity in check(one, through_engine=False)}
    whole = {quantity.name: quantity for quantity in check(one, dtype="bfloat16", through_engine=False)}
    rounded = {quantity.name: quantity for quantity in check(one, dtype="fp8", through_engine=False)}
    for name in EXACT | CLOSE:
        assert whole[name].ok, name
        assert rounded[name].ok, name
    assert whole["crops"].differing == rounded["crops"].differing == 0
    for name in CLOSE:
        assert 10 * exact[name].worst < whole[name].worst < rounded[name].worst, name
    assert rounded["boxes"].differing > 0
    assert {
        quantity.name for quantity in check(one, "cpu", "fp8", 1e-3, through_engine=False) if not quantity.ok
    } == CLOSE
    alter_tensors(one / "model.safetensors", not_a_number)
    assert "image embeddings" in {
        quantity.name for quantity in check(one, dtype="fp8", through_engine=False) if not quantity.ok
    }


@pytest.mark.parametrize(
    ("device", "dtype", "says"), [("cpu", "int4", "bfloat16, float16, fp8"), ("pc", "fp8", "cuda:N")]
)
def test_no_device_and_no_dtype_are_one_line(one: Path, device: str, dtype: str, says: str) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        check(one, device, dtype)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "cases.json", "arrays.safetensors", "images/0.png"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00 not this"])
def test_a_missing_or_broken_file_is_one_line(one: Path, name: str, content: bytes | None) -> None:
    (one / name).unlink()
    if content is not None:
        (one / name).write_bytes(content)
    with pytest.raises(ModelFilesError) as caught:
        check(one, through_engine=False)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda case: case.pop("image"),
        lambda case: case.pop("query"),
        lambda case: case.update(detect=[]),
        lambda case: case.update(detect={"person": {"much": []}}),
        lambda case: case.update(detect={"person": {"-8.0": [{}] * 6}}),
        lambda case: case.update(tiling=3),
    ],
)
def test_a_case_of_another_form_is_one_line(one: Path, change: Callable[[dict[str, Any]], None]) -> None:
    alter_case(one, change)
    with pytest.raises(ModelFilesError) as caught:
        check(one, through_engine=False)
    assert len(str(caught.value).splitlines()) == 1


def test_a_set_without_cases_proves_nothing(one: Path) -> None:
    (one / "cases.json").write_text("[]")
    with pytest.raises(ModelFilesError, match="no test cases"):
        check(one, through_engine=False)


def test_arrays_and_cases_that_do_not_match_are_one_line(one: Path) -> None:
    alter_tensors(one / "arrays.safetensors", lambda tensors: tensors.pop("0.image_embeddings"))
    with pytest.raises(ModelFilesError, match="image_embeddings"):
        check(one, through_engine=False)
