"""Configuration of Moondream models, read from config.json.

Field names are those of the published files. Some fields exist only in Saccade's own models (`vision.stem`, `classes`,
`repeat_iou` and others). Their defaults reproduce the published models. A configuration with `text.moe` is Moondream 3,
which has other defaults (`_MOONDREAM_3`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from saccade.engine.errors import ModelFilesError
from saccade.engine.models.protocol import ModelLimits

_T = TypeVar("_T")


class ModelConfigError(ModelFilesError):
    """Error: a config.json is not a valid Moondream configuration."""


@dataclass(slots=True, frozen=True)
class ExpertsConfig:
    """Configuration of the mixture of experts, which replaces the MLP in layers `start_layer` and higher."""

    num_experts: int = 64
    start_layer: int = 4
    experts_per_token: int = 8
    expert_inner_dim: int = 1024


@dataclass(slots=True, frozen=True)
class TextConfig:
    """Configuration of the text decoder.

    Attributes:
        group_size: number of weights per quantization scale in 4-bit files, or 0. 4-bit weights are dequantized at load
            time.
        prefix_attn: number of positions of the image prefix (BOS and image tokens), which have bidirectional attention.
        moe: configuration of Moondream 3's mixture of experts, or None.
        rope_theta: base of the rotary position embedding (RoPE).
        tau: 1 if attention has a learned temperature (`text.Temperature`), else 0.
        gelu: GELU variant of the expert gates and the attention temperature: `erf` or `tanh`. Kernels support only
            `erf`.
    """

    dim: int = 2048
    ff_dim: int = 8192
    n_layers: int = 24
    vocab_size: int = 51200
    max_context: int = 2048
    n_heads: int = 32
    n_kv_heads: int = 32
    group_size: int = 0
    prefix_attn: int = 730
    moe: ExpertsConfig | None = None
    rope_theta: float = 10000.0
    tau: int = 0
    gelu: str = "erf"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def rotary_dim(self) -> int:
        """Number of channels of each head that RoPE rotates. They are the first half of the channels."""
        return self.head_dim // 2


@dataclass(slots=True, frozen=True)
class VisionConfig:
    """Configuration of the vision encoder.

    `stem` selects the architecture: "patch" is the vision transformer of the published models, "picodet" is an object
    detector (`nano.detector_tower`). The detector has `n_classes` classes. It returns `n_places` image tokens for
    detections, and `coarse`² image tokens for a grid over the image. Each grid cell has one box. If `part_class` is
    below `n_classes`, each cell has a second box, for the class with this index.
    """

    enc_dim: int = 1152
    enc_patch_size: int = 14
    enc_n_layers: int = 27
    enc_ff_dim: int = 4304
    enc_n_heads: int = 16
    proj_out_dim: int = 2048
    crop_size: int = 378
    in_channels: int = 3
    max_crops: int = 12
    overlap_margin: int = 4
    proj_inner_dim: int = 8192
    stem: str = "patch"
    n_places: int = 0
    coarse: int = 0
    n_classes: int = 0
    part_class: int = 0

    @property
    def n_boxes(self) -> int:
        """Number of boxes that the detector predicts per grid cell."""
        return 2 if self.part_class < self.n_classes else 1

    @property
    def grid(self) -> int:
        """Number of image tokens along one side of a crop. The encoder returns `grid`² tokens."""
        return self.crop_size // self.enc_patch_size

    @property
    def n_tokens(self) -> int:
        """Number of tokens per image, which does not depend on the number of crops."""
        return self.n_places + self.coarse**2 if self.stem == "picodet" else self.grid * self.grid


@dataclass(slots=True, frozen=True)
class RegionConfig:
    """Configuration of the region heads, which encode and decode coordinates and sizes.

    Attributes:
        inner_dim: hidden width of the decoders. If 0, each decoder is a linear layer.
        reads: normalization of the hidden state before the decoders: `raw` (none, Moondream 2), `ln` (`region.ln`), or
            `post_ln_ln` (last norm of the text decoder, then `region.ln`). "" selects `ln` if the weights contain
            `region.ln`, else `raw`. `saccade doctor --model` tests all three.
        group_size: number of weights per quantization scale in 4-bit files, or 0.
    """

    dim: int = 2048
    coord_feat_dim: int = 256
    coord_out_dim: int = 1024
    size_feat_dim: int = 512
    size_out_dim: int = 2048
    inner_dim: int = 8192
    reads: str = ""
    group_size: int = 0


@dataclass(slots=True, frozen=True)
class TokenizerConfig:
    """IDs of special tokens, and token IDs of the prompt templates.

    `query_suffixes` is the number of times that the template's suffix follows a question without reasoning.
    `suppresses` is 1 if some special tokens must not be sampled in answers and reasoning, and 0 for Moondream 3.1.
    """

    bos_id: int = 0
    eos_id: int = 0
    answer_id: int = 3
    thinking_id: int = 4
    coord_id: int = 5
    size_id: int = 6
    start_ground_points_id: int = 7
    end_ground_id: int = 9
    query_suffixes: int = 2
    suppresses: int = 1
    templates: Mapping[str, Any] = field(
        default_factory=lambda: {
            "caption": {
                "short": [1, 32708, 2, 12492, 3],
                "normal": [1, 32708, 2, 6382, 3],
                "long": [1, 32708, 2, 4059, 3],
            },
            "query": {"prefix": [1, 15381, 2], "suffix": [3]},
            "detect": {"prefix": [1, 7235, 476, 2], "suffix": [3]},
            "point": {"prefix": [1, 2581, 2], "suffix": [3]},
        }
    )

    @property
    def in_words(self) -> bool:
        """Whether prompts are plain text such as 'Question:', as in models before 2025-06 and in the 0.5B model."""
        return self.eos_id == _GPT2_END


_GPT2_END = 50256
REGION_READS = ("raw", "ln", "post_ln_ln")
"""Valid values of `RegionConfig.reads`."""
_MOONDREAM_3: Mapping[str, Mapping[str, Any]] = {
    "text": {"max_context": 4096, "rope_theta": 1.5e6, "tau": 1},
    "region": {"inner_dim": 0},
    "tokenizer": {"query_suffixes": 1},
}
"""Defaults of Moondream 3 for fields missing in config.json."""
_NOTHING: Mapping[str, Mapping[str, Any]] = {}
_MOE_NAMES = {"n_experts": "num_experts", "n_experts_per_tok": "experts_per_token"}
"""Alternative names of `ExpertsConfig` fields."""


@dataclass(slots=True, frozen=True)
class MoondreamConfig:
    """Configuration of a whole Moondream model.

    Attributes:
        text, vision, region, tokenizer: sections of the configuration.
        classes: the only labels that the model detects, or None for an open vocabulary.
        repeat_iou: IoU above which a box is dropped as a duplicate of an earlier box of the same answer. None for
            published models, which keep all boxes.
    """

    text: TextConfig = field(default_factory=TextConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    region: RegionConfig = field(default_factory=RegionConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    classes: tuple[str, ...] | None = None
    repeat_iou: float | None = None

    @property
    def limits(self) -> ModelLimits:
        """Model sizes and token IDs that the scheduler needs."""
        text, ids = self.text, self.tokenizer
        return ModelLimits(
            prefix_length=text.prefix_attn,
            max_context=text.max_context,
            vocab_size=text.vocab_size,
            dim=text.dim,
            n_layers=text.n_layers,
            n_kv_heads=text.n_kv_heads,
            head_dim=text.head_dim,
            bos_id=self.tokenizer.bos_id,
            suppressed_ids=(ids.answer_id,) if ids.suppresses and not ids.in_words else (),
            coord_id=self.tokenizer.coord_id,
            repeat_iou=self.repeat_iou,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]] = _NOTHING) -> MoondreamConfig:
        """Create a configuration from a parsed config.json.

        Args:
            values: the parsed config.json.
            known: values derived from the weights, keyed by section and field. They are the defaults of missing fields.

        Raises:
            ModelConfigError: for the first field that is unknown, has a wrong type, or contradicts other fields.
        """
        unknown = set(values) - {"text", "vision", "region", "tokenizer", "classes", "repeat_iou", "skills"}
        if unknown:
            raise ModelConfigError(f"unknown section '{min(unknown)}' in the model configuration")
        classes = values.get("classes")
        if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            raise ModelConfigError("the field 'classes' must be a list of class names")
        repeat_iou = values.get("repeat_iou")
        if repeat_iou is not None and not (isinstance(repeat_iou, int | float) and 0 < repeat_iou <= 1):
            raise ModelConfigError("the field 'repeat_iou' must be a number above 0 and at most 1")
        values = _usual_names(values)
        text = values.get("text", {})
        unsaid: Mapping[str, Mapping[str, Any]] = {}
        if isinstance(text, Mapping):
            experts = known.get("text", {}).get("moe")
            if experts is not None and isinstance(text.get("moe") or {}, Mapping):
                given = {_MOE_NAMES.get(key, key): value for key, value in (text.get("moe") or {}).items()}
                text = {**text, "moe": {**experts, **given}}
                values = {**values, "text": text}
            unsaid = _MOONDREAM_3 if text.get("moe") is not None else {}
        unsaid = {name: {**unsaid.get(name, {}), **known.get(name, {})} for name in {*unsaid, *known}}
        config = cls(
            text=_section(TextConfig, "text", values, _heads(text, unsaid)),
            vision=_section(VisionConfig, "vision", values, unsaid),
            region=_section(RegionConfig, "region", values, unsaid),
            tokenizer=_outlining(_section(TokenizerConfig, "tokenizer", values, unsaid), text),
            classes=None if classes is None else tuple(classes),
            repeat_iou=repeat_iou,
        )
        config._check()
        return config

    @classmethod
    def from_file(cls, path: Path, known: Mapping[str, Mapping[str, Any]] = _NOTHING) -> MoondreamConfig:
        """Read a configuration from a config.json.

        Args:
            path: the config.json.
            known: values derived from the weights, keyed by section and field. They are the defaults of missing fields.

        Raises:
            ModelConfigError: if the file is not a valid configuration. The message names the file.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ModelConfigError("the file must contain a JSON object")
            # On the hub, the configuration of the model is inside that of the transformers library. {} means all
            # defaults.
            return cls.from_dict(values["config"] if _wrapped(values) else values, known)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, ModelConfigError) as error:
            raise ModelConfigError(f"{path}: {error}") from error

    def _check(self) -> None:
        text, vision, region = self.text, self.vision, self.region
        for name, count in (
            ("text.n_heads", text.n_heads),
            ("text.n_kv_heads", text.n_kv_heads),
            ("vision.enc_n_heads", vision.enc_n_heads),
            ("vision.enc_patch_size", vision.enc_patch_size),
            ("vision.crop_size", vision.crop_size),
        ):
            if not count:
                raise ModelConfigError(f"the field '{name}' of the model configuration must be above 0")
        for claim, holds in (
            ("text.dim must be a multiple of text.n_heads", text.dim % text.n_heads == 0),
            ("text.n_heads must be a multiple of text.n_kv_heads", text.n_heads % text.n_kv_heads == 0),
            ("text.dim / text.n_heads must be a multiple of 4", text.head_dim % 4 == 0),
            ("vision.enc_dim must be a multiple of vision.enc_n_heads", vision.enc_dim % vision.enc_n_heads == 0),
            (
                "vision.crop_size must be a multiple of vision.enc_patch_size",
                vision.crop_size % vision.enc_patch_size == 0,
            ),
            (
                "twice vision.overlap_margin must be less than the patches per side of a crop",
                2 * vision.overlap_margin < vision.grid,
            ),
            ("vision.proj_out_dim must equal text.dim", vision.proj_out_dim == text.dim),
            ("region.dim must equal text.dim", region.dim == text.dim),
            ("region.size_out_dim must be even", region.size_out_dim % 2 == 0),
            ("text.prefix_attn must be 1 + image tokens", text.prefix_attn == 1 + vision.n_tokens),
            ("text.rope_theta must be above 0", text.rope_theta > 0),
            (
                "text.tau is 1 or 0, and 1 needs text.n_kv_heads to equal text.n_heads",
                text.tau == 0 or (text.tau == 1 and text.n_kv_heads == text.n_heads),
            ),
            (
                "text.moe needs from 1 to num_experts experts_per_token, and an expert_inner_dim",
                text.moe is None
                or (1 <= text.moe.experts_per_token <= text.moe.num_experts and text.moe.expert_inner_dim > 0),
            ),
            ("text.gelu must be 'erf' or 'tanh'", text.gelu in ("erf", "tanh")),
            (f"region.reads must be one of {', '.join(REGION_READS)}", region.reads in ("", *REGION_READS)),
            ("text.max_context must be more than text.prefix_attn", text.max_context > text.prefix_attn),
            ("region.coord_feat_dim must be even", region.coord_feat_dim % 2 == 0),
            ("region.size_feat_dim must be even", region.size_feat_dim % 2 == 0),
            ("vision.stem must be 'patch' or 'picodet'", vision.stem in ("patch", "picodet")),
            (
                "vision.stem 'picodet' needs n_places up to 192, coarse, n_classes, max_crops 1 and crops of 32 pixels",
                vision.stem != "picodet"
                or (
                    0 < vision.n_places <= 192
                    and min(vision.coarse, vision.n_classes) > 0
                    and vision.max_crops == 1
                    and vision.crop_size % 32 == 0
                ),
            ),
        ):
            if not holds:
                raise ModelConfigError(claim)
        for name in ("bos_id", "eos_id", "answer_id", "coord_id", "size_id"):
            if getattr(self.tokenizer, name) >= text.vocab_size:
                raise ModelConfigError(f"tokenizer.{name} must be below text.vocab_size")
        _check_templates(self.tokenizer.templates, text.vocab_size)


_REASONING = ("reasoning_prefix", "post_reasoning_prefix")
"""Parts of a query template: before the reasoning, and between reasoning and answer."""


def _check_templates(templates: Mapping[str, Any], vocab_size: int) -> None:
    """Check that each prompt template of a config.json has lists of valid token IDs.

    A model does not support a skill for which it has no template.
    """
    for skill, parts in (
        ("detect", ("prefix", "suffix")),
        ("point", ("prefix", "suffix")),
        ("segment", ("prefix", "suffix")),
        ("query", ("prefix", "suffix", *_REASONING)),
        ("caption", ("short", "normal", "long")),
    ):
        template = templates.get(skill)
        if not template:
            continue
        for part in parts:
            optional = skill == "caption" or part in _REASONING
            if optional and isinstance(template, Mapping) and part not in template:
                continue  # the model does not support this caption length
            ids = template.get(part) if isinstance(template, Mapping) else None
            if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise ModelConfigError(
                    f"tokenizer.templates.{skill}.{part} must be a list of token IDs below text.vocab_size"
                )


def _wrapped(values: Mapping[str, Any]) -> bool:
    return isinstance(values.get("config"), dict) and ("architectures" in values or "text" not in values)


def _usual_names(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the configuration fields of Moondream 3.1 to their names in earlier versions."""
    values = {name: value for name, value in values.items() if name != "decoder_arch"}
    text, region, tokenizer = (values.get(name) for name in ("text", "region", "tokenizer"))
    if isinstance(text, Mapping) and _NEWER.intersection(text):
        values["text"] = {name: value for name, value in text.items() if name not in _NEWER}
        if isinstance(text.get("tau_attn"), bool):
            values["text"].setdefault("tau", int(text["tau_attn"]))
    if isinstance(region, Mapping) and isinstance(region.get("use_ln"), bool):
        values["region"] = {name: value for name, value in region.items() if name != "use_ln"}
        values["region"].setdefault("reads", "ln" if region["use_ln"] else "raw")
    templates = tokenizer.get("templates") if isinstance(tokenizer, Mapping) else None
    query = templates.get("query") if isinstance(templates, Mapping) else None
    if isinstance(tokenizer, Mapping) and isinstance(templates, Mapping) and isinstance(query, Mapping):
        if "answer_prefix" in query:
            usual = TokenizerConfig().templates["query"]["prefix"]
            query = {"prefix": usual, "suffix": query["answer_prefix"], **query}
        values["tokenizer"] = {**tokenizer, "templates": {**templates, "query": query}}
    return values


_NEWER = {"tau_attn", "decoder_arch", "use_ln"}
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "float": (float, int)}
"""Accepted types of a field by its annotation; other annotations accept objects."""


def _section(kind: type[_T], name: str, values: Mapping[str, Any], unsaid: Mapping[str, Mapping[str, Any]]) -> _T:
    section = values.get(name.rpartition(".")[2], {})
    if not isinstance(section, Mapping):
        raise ModelConfigError(f"section '{name}' must be a JSON object")
    defaults = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    read = dict(unsaid.get(name, {}))
    for key, value in section.items():
        if name == "text" and key == "moe":
            if value is not None:
                read[key] = _experts(section)
            continue
        if key == "group_size" and value is None:  # published files use null if there are no 4-bit weights
            continue
        if key not in defaults:
            raise ModelConfigError(f"unknown field '{name}.{key}' in the model configuration")
        expected = _KINDS.get(str(defaults[key].type), (Mapping,))
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ModelConfigError(f"the field '{name}.{key}' must be of type {expected[0].__name__}; got {value!r}")
        if isinstance(value, int | float) and not 0 <= value < float("inf"):
            raise ModelConfigError(f"the field '{name}.{key}' must be finite and not negative; got {value!r}")
        read[key] = value
    return kind(**read)


def _outlining(tokenizer: TokenizerConfig, text: Any) -> TokenizerConfig:
    """Add Moondream 3's segmentation prompt template to a mixture-of-experts model that has none."""
    if not isinstance(text, Mapping) or text.get("moe") is None or "segment" in tokenizer.templates:
        return tokenizer
    if text.get("vocab_size", TextConfig().vocab_size) <= max(_SEGMENT["prefix"]):  # a small test model
        return tokenizer
    return dataclasses.replace(tokenizer, templates={**tokenizer.templates, "segment": _SEGMENT})


_SEGMENT = {"prefix": [1, 17374, 2], "suffix": [3]}


def _heads(text: Any, unsaid: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Set the default of `n_kv_heads` (key and value heads) to the number of query heads, as the 0.5B model needs."""
    if not isinstance(text, Mapping) or "n_heads" not in text:
        return unsaid
    return {**unsaid, "text": {**unsaid.get("text", {}), "n_kv_heads": text["n_heads"]}}


def _experts(text: Mapping[str, Any]) -> ExpertsConfig:
    section = text["moe"]
    if isinstance(section, Mapping):
        text = {"moe": {_MOE_NAMES.get(key, key): value for key, value in section.items()}}
    return _section(ExpertsConfig, "text.moe", text, {})
