"""Moondream 3.1's files: synthetic ones with the published names, from the same weights as one of Moondream 3."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from saccade.engine import Detect, Engine, EngineError, Query
from saccade.engine.kernels import E4M3
from saccade.engine.models import registry
from saccade.engine.models.checkpoint import CheckpointError
from saccade.engine.models.moondream.config import ExpertsConfig, MoondreamConfig
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream, load, open_checkpoint
from saccade.engine.models.protocol import Phase
from saccade.engine.models.quantization import quantize, round_to_fp8
from saccade.engine.tasks.text_output import ReasoningOutput, TextOutput
from tests.support.engine import TINY_3, noise, one_thread, random_model, write_model
from tests.support.engine.material import DEVICES, NO_GPU

CPU = torch.device("cpu")
CONFIG = dataclasses.replace(TINY_3, region=dataclasses.replace(TINY_3.region, reads="ln"))
BLOCK = {
    "ln": "ln",
    "attn.qkv": "mixer.Wqkv",
    "attn.proj": "mixer.out_proj",
    "mlp.router": "gate",
    "attn.tau.wq": "tau_wq",
    "attn.tau.wv": "tau_wv",
    "attn.tau.alpha": "tau_alpha",
}
REST = {
    "text.wte": "text_model.transformer.embd.wte.weight",
    "text.post_ln": "text_model.lm_head.ln",
    "text.lm_head": "text_model.lm_head.linear",
    "vision.patch_emb": "vision_encoder.encoder.model.visual.patch_embed.linear",
    "vision.pos_emb": "vision_encoder.encoder.model.visual.pos_embed",
    "vision.post_ln": "vision_encoder.encoder.model.visual.norm",
    "vision.proj_mlp": "vision_encoder.projection.mlp",
    "region.coord_encoder": "region_model.coordinate_encoder",
    "region.coord_decoder": "region_model.coordinate_head",
    "region.coord_features": "region_model.coordinate_features.weight",
    "region.size_encoder": "region_model.size_encoder",
    "region.size_decoder": "region_model.size_head",
    "region.size_features": "region_model.size_features.weight",
    "region.ln": "region_model.ln",
}


def published(name: str, dense: bool) -> str:
    """What Moondream 3.1 calls one of our tensors."""
    parts = name.split(".")
    if name.startswith("text.blocks."):
        own, head = ".".join(parts[3:]), f"text_model.transformer.h.{parts[2]}."
        if own.startswith("mlp.fc") and not dense:
            return head + {"fc1": "mlp.experts.weight", "fc2": "mlp.output_experts.weight"}[parts[4]]
        for ours, theirs in BLOCK.items():
            if own == ours or own.startswith(ours + "."):
                return head + theirs + own.removeprefix(ours)
        return head + own
    if name.startswith("vision.blocks."):
        own = ".".join(parts[3:]).replace("ln1", "norm1").replace("ln2", "norm2")
        return f"vision_encoder.encoder.model.visual.blocks.{parts[2]}.{own}"
    for ours, theirs in REST.items():
        if name == ours or name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    raise AssertionError(name)


def as_3_1(model: Moondream, joined_tau: bool = False) -> dict[str, torch.Tensor]:
    """A model's weights as Moondream 3.1's file has them."""
    start = model.config.text.moe.start_layer if model.config.text.moe else 0
    held = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        dense = name.startswith("text.blocks.") and int(parts[2]) < start
        stored = tensor.t() if name.endswith("_features") else tensor
        held[published(name, dense)] = stored.contiguous()
    if joined_tau:
        for number in range(model.config.text.n_layers):
            head = f"text_model.transformer.h.{number}.tau_"
            held[head + "wqwv"] = torch.cat([held.pop(head + "wq"), held.pop(head + "wv")])
    return held


def write_3_1(folder: Path, held: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A folder as published: no `model_type`, and a config.json that need not mention experts."""
    folder.mkdir(exist_ok=True)
    values = json.loads(json.dumps(dataclasses.asdict(changes.get("config", CONFIG))))
    for key in ("moe", "tau", "rope_theta", "max_context"):
        values["text"].pop(key)
    values["text"] |= {"tau_attn": True, "decoder_arch": "parallel"}
    for key in ("reads", "inner_dim"):
        values["region"].pop(key)
    values["region"]["use_ln"] = True
    for key in ("query_suffixes", "suppresses"):
        values["tokenizer"].pop(key)
    values["tokenizer"]["templates"]["query"] = {
        "prefix": [1, 38, 2],
        "answer_prefix": [3],
        "reasoning_prefix": [4],
        "post_reasoning_prefix": [3],
    }
    values["text"]["moe"] = changes.get("moe", {"experts_per_token": 2})
    (folder / "config.json").write_text(json.dumps(values))
    save_file(held, folder / "model.safetensors")
    return folder


def fp8(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts in FP8, and scales of keys and values."""
    changed = {}
    for name, tensor in held.items():
        head, _, own = name.partition(".mlp.")
        if own in ("experts.weight", "output_experts.weight"):
            codes, scales = zip(*(quantize(one) for one in tensor), strict=True)
            changed[name] = torch.stack(codes)
            changed[f"{head}.moe_quant.{'up' if own == 'experts.weight' else 'down'}_scale"] = torch.stack(scales)
            changed[f"{head}.kv_quantizer.k_scale"] = torch.tensor(0.5)
            changed[f"{head}.kv_quantizer.v_scale"] = torch.tensor(0.25)
        else:
            changed[name] = tensor
    assert len(changed) > len(held)
    return changed


@pytest.mark.parametrize("joined_tau", [False, True])
def test_every_published_name_loads_as_moondream_3_does(tmp_path: Path, joined_tau: bool) -> None:
    model = random_model(CONFIG)
    older = load(write_model(tmp_path / "3.0", CONFIG, model), CPU, torch.float32)
    newer = load(write_3_1(tmp_path / "3.1", as_3_1(model, joined_tau)), CPU, torch.float32)
    wanted, got = older.state_dict(), newer.state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    text = dataclasses.replace(older.config.text, max_context=32768)
    assert newer.config.text == text
    assert newer.config.region == older.config.region
    assert older.family.startswith("Moondream 3 (preview): stored as F32")
    assert newer.family == "Moondream 3.1: stored as F32, context 32768"


@pytest.mark.parametrize("device", DEVICES)
def test_both_answer_alike_to_the_bit(tmp_path: Path, device: str) -> None:
    model, image = random_model(CONFIG), noise(40, 60)
    folders = write_model(tmp_path / "3.0", CONFIG, model), write_3_1(tmp_path / "3.1", as_3_1(model))
    answers = []
    for folder in folders:
        with one_thread(), Engine.load(str(folder), device, "float32") as engine:
            boxes, points = engine.detect(image, "cat", 4, 0.1), engine.point(image, "cat", 4, 0.1)
            answers.append((boxes, points, engine.query(image, "why?", 4).text, engine.caption(image, "short", 4).text))
    assert answers[0] == answers[1]
    assert answers[0][0].boxes


def test_an_answer_has_up_to_150_objects(tmp_path: Path) -> None:
    folder = write_3_1(tmp_path / "3.1", as_3_1(random_model(CONFIG)))
    with one_thread(), Engine.load(str(folder), "cpu") as engine:
        assert len(engine.detect(noise(40, 60), "cat", 150, 0.0).boxes) == 150


def test_a_prompt_may_be_thousands_of_tokens_long(tmp_path: Path) -> None:
    folder, image = write_3_1(tmp_path, as_3_1(random_model(CONFIG))), noise(40, 60)
    question = "why? " * 1200
    with one_thread(), Engine.load(str(folder), "cpu") as engine:
        answer = engine.query(image, question, 1)
        with pytest.raises(EngineError, match=r"need 1565 KV cache pages \(1023 available\)") as caught:
            engine.query(image, "why? " * 5000, 1)
        assert "\n" not in str(caught.value)
        model, prompts = engine._loaded.model, engine._loaded.prompts
    assert isinstance(model, Moondream)
    assert model.limits.max_context == 32768
    crops = model.vision.make_crops(image)
    with torch.inference_mode():
        tokens = model.vision(model.vision.normalize(torch.from_numpy(crops.pixels)), crops.tiling)
        ids = torch.tensor([0]), torch.tensor(prompts.query(question))
        x = torch.cat([model.text.embed(ids[0]), tokens, model.text.embed(ids[1])]).unsqueeze(0)
        hidden = model.text(x, torch.arange(x.shape[1]).unsqueeze(0))
        likeliest = int(model.text.logits(hidden[0, -1]).argmax())
    assert answer.text == prompts.text([likeliest])


def test_experts_in_fp8_are_what_their_scales_make_of_them(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    held = fp8(as_3_1(model))
    loaded = load(write_3_1(tmp_path, held), CPU, torch.float32)
    assert "experts in FP8" in loaded.family
    for number in (1, 2):
        head = f"text_model.transformer.h.{number}."
        for part, scale in (("experts", "up"), ("output_experts", "down")):
            codes, scales = held[f"{head}mlp.{part}.weight"], held[f"{head}moe_quant.{scale}_scale"]
            ours = loaded.text.blocks[number].get_submodule("mlp.fc1" if scale == "up" else "mlp.fc2").weight
            assert torch.equal(ours, codes.float() * scales.unsqueeze(-1))


def test_fp8_keeps_the_numbers_of_the_file(tmp_path: Path) -> None:
    """Also where a row's largest number is not FP8's largest, as of a file that was not scaled by its own maxima."""
    held = fp8(as_3_1(random_model(CONFIG)))
    for name in held:
        if name.endswith("_scale") and held[name].ndim:
            held[name] *= 1.37
    name = "text_model.transformer.h.1.mlp.experts.weight"
    numbers = held[name].float()
    held[name] = numbers.where(numbers.abs() < 300, 7.0).to(E4M3)
    loaded = load(write_3_1(tmp_path, held), CPU, torch.bfloat16)
    round_to_fp8(loaded)
    experts = loaded.text.blocks[1].get_submodule("mlp")
    assert isinstance(experts, Experts)
    assert experts.scales is not None
    for number, one in enumerate(experts.fc1.weight):
        codes, scale = quantize(one, experts.scales[0][number])
        assert torch.equal(codes.float(), held[name][number].float())
        assert torch.equal(scale, held["text_model.transformer.h.1.moe_quant.up_scale"][number])


def test_experts_kept_in_fp8_are_multiplied_as_dequantized_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has them, beside other weights in half precision."""
    folder = write_3_1(tmp_path, fp8(as_3_1(random_model(CONFIG))))
    plain = load(folder, CPU, torch.bfloat16)
    monkeypatch.setattr("saccade.engine.models.moondream.model._keeps_fp8", lambda device, dtype: True)
    kept = load(folder, CPU, torch.bfloat16)
    experts = kept.text.blocks[1].get_submodule("mlp")
    assert isinstance(experts, Experts)
    assert (experts.fc1.weight.dtype, experts.router.weight.dtype) == (E4M3, torch.bfloat16)
    x, at = torch.randn(2, 3, 32).bfloat16(), torch.arange(3).expand(2, -1)
    assert torch.equal(kept.text(x, at), plain.text(x, at))


@NO_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_gpu_keeps_experts_in_fp8(tmp_path: Path, dtype: str) -> None:
    """In a shape that kernels take; answers are about those of dequantized weights."""
    text = dataclasses.replace(
        CONFIG.text,
        dim=256,
        ff_dim=512,
        n_heads=8,
        n_kv_heads=8,  # type: ignore[arg-type]
        moe=ExpertsConfig(num_experts=16, start_layer=1, experts_per_token=2, expert_inner_dim=256),
    )
    region = {"dim": 256, "coord_feat_dim": 64, "size_feat_dim": 128}
    config = dataclasses.replace(
        CONFIG,
        text=text,
        vision=dataclasses.replace(CONFIG.vision, proj_out_dim=256),
        region=dataclasses.replace(CONFIG.region, **region),  # type: ignore[arg-type]
    )
    held = fp8(as_3_1(random_model(config)))
    folder, image = write_3_1(tmp_path, held, config=config), noise(40, 60)
    with Engine.load(str(folder), "cuda", dtype) as engine:
        experts = engine._loaded.model.text.get_submodule("blocks.1.mlp")  # type: ignore[attr-defined]
        assert isinstance(experts, Experts)
        codes = held["text_model.transformer.h.1.mlp.experts.weight"]
        assert torch.equal(experts.fc1.weight.cpu().float(), codes.float())
        found = engine.submit(image, [Detect("cat", 8, 0.0), Query("why?", 12)] * 4).result(60)
        assert len(found.detections.boxes) == 32
        assert not engine.model.fallbacks


def test_fp8_in_moondream_3s_own_names(tmp_path: Path) -> None:
    model, held = random_model(CONFIG), {}
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 3 and ".mlp.fc" in name:
            codes, scales = zip(*(quantize(one) for one in tensor), strict=True)
            held[f"model.{name}"] = torch.stack(codes)
            kind = "up" if "fc1" in name else "down"
            held[f"model.{name.partition('.mlp.')[0]}.moe_quant.{kind}_scale"] = torch.stack(scales)
        else:
            held[f"model.{name}"] = tensor.contiguous()
    write_model(tmp_path, CONFIG, model)
    save_file(held, tmp_path / "model.safetensors")
    assert load(tmp_path, CPU, torch.float32).family.startswith("Moondream 3 (preview): stored as F32 and F8_E4M3, exp")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop("region_model.ln.bias"), r"'model.region.ln.bias' of shape \[32\] is missing"),
        (
            lambda held: held.update({"text_model.transformer.h.1.other": torch.zeros(3)}),
            r"h\.1\.other' of shape \[3\] is not part",
        ),
        (lambda held: held.update({"a": torch.zeros(3), "b": torch.zeros(3)}), r"is not part .* \(and 1 more\)"),
        (lambda held: held.pop("text_model.transformer.h.1.moe_quant.up_scale"), r"mlp\.fc1\.weight' has no scale"),
        (
            lambda held: held.update({"text_model.transformer.h.1.moe_quant.up_scale": torch.zeros(3)}),
            "must have one scale per expert output",
        ),
        (
            lambda held: held.update({"text_model.transformer.h.0.moe_quant.up_scale": torch.zeros(3)}),
            "is an FP8 scale, but tensor '",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, change: Any, says: str) -> None:
    held = fp8(as_3_1(random_model(CONFIG)))
    change(held)
    write_3_1(tmp_path, held)
    with ExitStack() as files, pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(tmp_path, files)
    assert "\n" not in str(caught.value)


def test_the_weights_say_what_config_json_does_not(tmp_path: Path) -> None:
    folder = write_3_1(tmp_path, as_3_1(random_model(CONFIG)), moe=None)
    config = load(folder, CPU, torch.float32).config
    assert config.text.moe is not None
    assert (config.text.moe.num_experts, config.text.moe.start_layer, config.text.moe.expert_inner_dim) == (6, 1, 20)
    assert (config.text.max_context, config.text.tau, config.limits.suppressed_ids) == (32768, 1, ())


def test_prompts_follow_the_newer_templates(tmp_path: Path) -> None:
    prompts = registry.load(write_3_1(tmp_path, as_3_1(random_model(CONFIG))), CPU, torch.float32).prompts
    words = prompts.ids("why?")
    assert prompts.query("why?") == [1, 38, 2, *words, 3]
    assert prompts.query("why?", reasoning=True) == [1, 38, 2, *words, 4]
    assert prompts.reasoning is not None
    assert (prompts.reasoning.suffix, prompts.reasoning.forbidden, prompts.reasoning.end) == ((3,), (), 0)


def test_the_end_token_may_end_a_reasoning() -> None:
    from saccade.engine.models.protocol import ReasoningTokens

    tokens = ReasoningTokens(3, (3,), (), 5, frozenset({7, 9}), 0)
    output = ReasoningOutput(TextOutput(0, 4, 4), tokens, 4, str)
    assert output.next_phase() is Phase.REASONING
    assert output.rule().forbidden == ()
    assert not output.commit((8.0, 0.0, 0.0))
    output.next_phase()
    output.rule()
    assert output.commit((0.0, 0.0, 0.0))
    assert output.n_tokens == 1


def test_the_families_differ_in_what_is_not_sampled() -> None:
    assert MoondreamConfig.from_dict({}).limits.suppressed_ids == (3,)
    assert MoondreamConfig.from_dict({"text": {"moe": {}}}).limits.suppressed_ids == (3,)
    newer = MoondreamConfig.from_dict({"text": {"moe": {}}, "tokenizer": {"suppresses": 0}})
    assert newer.limits.suppressed_ids == ()
