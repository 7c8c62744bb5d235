from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from saccade.engine.models.moondream.config import ModelConfigError, MoondreamConfig
from tests.support.engine import GOLDEN, NANO

GIVEN = json.loads((GOLDEN / "config.json").read_text())
NANOS = json.loads((NANO / "config.json").read_text())


def changed(path: str, value: Any, base: dict[str, Any] = GIVEN) -> dict[str, Any]:
    values = copy.deepcopy(base)
    *above, last = path.split(".")
    inner = values
    for name in above:
        inner = inner[name]
    inner[last] = value
    return values


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ModelConfigError) as caught:
        MoondreamConfig.from_dict(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_golden_config_is_read_as_it_is() -> None:
    config = MoondreamConfig.from_dict(GIVEN)
    assert config.text.dim == GIVEN["text"]["dim"]
    assert config.vision.grid == 27
    assert config.vision.n_tokens == 729
    assert config.text.rotary_dim == config.text.head_dim // 2 == 32
    assert config.classes is None


def test_an_empty_config_is_moondream_2_as_published() -> None:
    config = MoondreamConfig.from_dict({})
    assert (config.text.dim, config.text.n_layers, config.vision.enc_n_layers) == (2048, 24, 27)
    assert config.tokenizer.templates["detect"]["prefix"] == [1, 7235, 476, 2]


def test_nanos_config_names_its_classes() -> None:
    config = MoondreamConfig.from_file(NANO / "config.json")
    assert config.classes is not None
    assert config.classes[0] == "person"
    assert config.text.prefix_attn == 1 + config.vision.n_tokens == 146


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("txt", {}, "unknown section 'txt'"),
        ("text.dimm", 3, "unknown field 'text.dimm'"),
        ("vision.colour", 3, "unknown field 'vision.colour'"),
        ("text", [], "section 'text' must be a JSON object"),
        ("text.dim", "128", "field 'text.dim' must be of type int; got '128'"),
        ("text.dim", 128.0, "field 'text.dim' must be of type int; got 128.0"),
        ("text.dim", True, "field 'text.dim' must be of type int; got True"),
        ("text.dim", None, "field 'text.dim' must be of type int; got None"),
        ("text.n_layers", -1, "field 'text.n_layers' must be finite and not negative"),
        ("vision.stem", 3, "field 'vision.stem' must be of type str; got 3"),
        ("tokenizer.templates", [1], "field 'tokenizer.templates' must be of type Mapping; got [1]"),
    ],
)
def test_the_field_that_is_unknown_or_of_a_wrong_type_is_named(path: str, value: Any, says: str) -> None:
    assert says in refusal(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("text.n_heads", 3, "text.dim must be a multiple of text.n_heads"),
        ("text.n_kv_heads", 3, "text.n_heads must be a multiple of text.n_kv_heads"),
        ("text.n_heads", 64, "text.dim / text.n_heads"),
        ("vision.enc_n_heads", 5, "vision.enc_dim must be a multiple of vision.enc_n_heads"),
        ("vision.enc_patch_size", 13, "vision.crop_size must be a multiple of vision.enc_patch_size"),
        ("vision.overlap_margin", 14, "vision.overlap_margin"),
        ("vision.proj_out_dim", 64, "vision.proj_out_dim must equal text.dim"),
        ("region.dim", 64, "region.dim must equal text.dim"),
        ("region.size_out_dim", 2047, "region.size_out_dim must be even"),
        ("text.prefix_attn", 729, "text.prefix_attn"),
        ("vision.stem", "conv", "vision.stem"),
    ],
)
def test_dimensions_that_do_not_fit_each_other_are_refused(path: str, value: Any, says: str) -> None:
    base = changed("text.n_kv_heads", 1) if path == "text.n_heads" else GIVEN
    assert says in refusal(changed(path, value, base))


@pytest.mark.parametrize(
    "path", ["text.n_heads", "text.n_kv_heads", "vision.enc_n_heads", "vision.enc_patch_size", "vision.crop_size"]
)
def test_a_zero_that_would_be_divided_by_is_refused(path: str) -> None:
    assert path in refusal(changed(path, 0))


@pytest.mark.parametrize("value", ["person", 5, [1, 2], {"person": 1}])
def test_classes_are_a_list_of_names(value: Any) -> None:
    assert "classes" in refusal(changed("classes", value))


@pytest.mark.parametrize("path", ["tokenizer.bos_id", "tokenizer.eos_id", "tokenizer.coord_id"])
def test_an_id_past_the_vocabulary_is_refused(path: str) -> None:
    assert path.split(".")[1] in refusal(changed(path, GIVEN["text"]["vocab_size"]))


@pytest.mark.parametrize(
    "template",
    [{"prefix": "one", "suffix": [3]}, {"suffix": [3]}, [1, 2, 3], {"prefix": [1, "2"], "suffix": [3]}],
)
def test_a_template_is_two_lists_of_ids(template: Any) -> None:
    assert "detect" in refusal(changed("tokenizer.templates.detect", template))


def test_a_context_shorter_than_the_image_is_refused() -> None:
    assert "max_context" in refusal(changed("text.max_context", 700))


@pytest.mark.parametrize(
    ("field", "value"), [("crop_size", 432), ("max_crops", 2), ("n_classes", 0), ("n_places", 0), ("coarse", 0)]
)
def test_a_detector_as_tower_needs_its_own_fields(field: str, value: int) -> None:
    values = changed(f"vision.{field}", value, NANOS)
    places, coarse = values["vision"]["n_places"], values["vision"]["coarse"]
    values["text"] |= {"prefix_attn": 1 + places + coarse**2}
    assert "vision.stem 'picodet'" in refusal(values)


def test_a_detector_has_boxes_of_its_own_for_one_class_or_none() -> None:
    assert MoondreamConfig.from_dict(NANOS).vision.n_boxes == 2
    without = changed("vision.part_class", NANOS["vision"]["n_classes"], NANOS)
    assert MoondreamConfig.from_dict(without).vision.n_boxes == 1


def test_odd_numbers_of_fourier_features_are_refused() -> None:
    assert "coord_feat_dim" in refusal(changed("region.coord_feat_dim", 33))
    assert "size_feat_dim" in refusal(changed("region.size_feat_dim", 33))


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"text": {"dim": 128,}}', b"[]", b'"text"', b"\xff\xfe\x00", b'{"text": {"dim": "x"}}']
)
def test_a_broken_file_is_refused_by_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.json: ") as caught:
        MoondreamConfig.from_file(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: "):
        MoondreamConfig.from_file(tmp_path / "config.json")
