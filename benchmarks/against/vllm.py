"""Compares vLLM and Saccade on a random model with Moondream 3's dimensions, one image at a time, on one GPU.

vLLM runs in a separate process, `python -m benchmarks.against.vllm FOLDER`, which prints one JSON line per measured
value.

All of vLLM's own dummy weights, including norms, are within ±0.001. All tokens then select the same few experts, and a
step is too fast. `register`, a vLLM plugin, draws weights like those of `moondream-3-random`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.against.harness import OURS, Comparison, Measured, begin, in_turns, require, require_gpu

_MODEL = "moondream-3-random"
_OBJECTS = (1, 3, 5)  # an object is 3 tokens
_ROWS = (1, 8, 32)
_CONTEXT, _SHORT, _LONG = 760, 8, 128
_PROMPT = "<|endoftext|><image><|md_reserved_0|>detect<|md_reserved_1|>person<|md_reserved_2|>"  # 745 tokens, ours 742
_SPECIAL = ["<|endoftext|>", "<|md_reserved_0|>", "<|md_reserved_1|>", "<|md_reserved_2|>", "<|md_reserved_3|>"]
_VOCAB = 51_200
_ROOT = Path(__file__).resolve().parents[2]
_UNITS = {f"{n} objects": "ms from image to answer" for n in _OBJECTS} | {
    "32 images at a time, 3 objects": "images/s",
    **{f"decode step, {rows} rows": "ms" for rows in _ROWS},
}
_NOTE = (
    "bf16, 640×360, random weights. vLLM's latency includes its preprocessing on the CPU (Pillow, 16 to 20 ms per "
    "image); Saccade preprocesses on the GPU. vLLM runs the bidirectional image prefix in Triton attention and the "
    "prefill without CUDA graphs, and has no tuned expert configuration for this shape. vLLM's decode steps are wall "
    "times: the difference between 128 and 8 tokens."
)


def compare(turns: int, requests: int, limit_s: float) -> Comparison:
    """Measure Saccade and vLLM in turns. Each loads its model once per turn.

    Raises:
        ConfigError: if this machine has no GPU or vLLM is not installed.
    """
    require_gpu("the comparison with vLLM")
    require("vllm", install="vllm")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_plugin(folder)
        made = begin("vllm", "Moondream 3's dimensions: Saccade and vLLM", _NOTE, _UNITS, ("vllm",))
        sides = {OURS: lambda: _saccade(requests), "vLLM": lambda: _vllm(folder, requests, limit_s)}
        return in_turns(made, sides, turns, warm_up=False)


def _saccade(requests: int) -> Measured:
    def bench(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, *arguments, "--model", _MODEL, "--dtype", "bfloat16", "--json"]
        found: dict[str, Any] = json.loads(subprocess.run(command, cwd=_ROOT, check=True, capture_output=True).stdout)
        return found

    found: dict[str, float] = {}
    for objects in _OBJECTS:
        one = bench("-m", "saccade", "bench", "frame", "--frames", str(requests), "--objects", str(objects))
        found[f"{objects} objects"] = one["median_ms"]
    many = bench("-m", "saccade", "bench", "throughput", "--streams", "32", "--objects", "3")
    found["32 images at a time, 3 objects"] = many["rows"][0]["fps"]
    steps = bench("-m", "benchmarks", "decode", "--rows", ",".join(map(str, _ROWS)), "--keys", str(_CONTEXT))
    for step in steps["rows"]:
        found[f"decode step, {step['rows']} rows"] = step["median_ms"]
    return found


def _vllm(folder: Path, requests: int, limit_s: float) -> Measured:
    paths = os.pathsep.join([str(folder), str(_ROOT), os.environ.get("PYTHONPATH", "")])
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1")
    env = {**os.environ, **offline, "PYTHONPATH": paths, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    command = [sys.executable, "-m", "benchmarks.against.vllm", str(folder / "model"), str(requests)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=limit_s, text=True)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def write_model(folder: Path) -> None:
    """Write config, tokenizer and processor files of a model with Moondream 3's dimensions, without weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    vocab = {name: number for number, name in enumerate([*_SPECIAL, "<image>"])}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    vocab |= {f"w{number}": number for number in range(len(vocab), _VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in [*_SPECIAL, "<image>"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    experts = {
        "num_experts": 64,
        "n_experts": 64,
        "start_layer": 4,
        "experts_per_token": 8,
        "n_experts_per_tok": 8,
        "expert_inner_dim": 1024,
    }
    text = {
        "dim": 2048,
        "ff_dim": 8192,
        "n_layers": 24,
        "vocab_size": _VOCAB,
        "max_context": 4096,
        "n_heads": 32,
        "n_kv_heads": 32,
        "prefix_attn": 730,
        "rope_theta": 1_500_000.0,
        "moe": experts,
    }
    crops = {"crop_size": 378, "max_crops": 12, "overlap_margin": 4}
    vision = {
        "enc_dim": 1152,
        "enc_patch_size": 14,
        "enc_n_layers": 27,
        "enc_ff_dim": 4304,
        "enc_n_heads": 16,
        "proj_inner_dim": 8192,
        **crops,
    }
    files: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["Moondream3ForCausalLM"],
            "model_type": "moondream3",
            "dtype": "bfloat16",
            "config": {"text": text, "vision": vision, "tokenizer": {"bos_id": 0, "eos_id": 0, "answer_id": 3}},
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 0},
        "preprocessor_config.json": {"processor_class": "Moondream3Processor"},
        "processor_config.json": {"processor_class": "Moondream3Processor", "patch_size": 14, **crops},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_plugin(folder: Path) -> None:
    """Write package metadata that makes `register` a vLLM plugin in processes with `folder` in PYTHONPATH."""
    info = folder / "saccade_bench_weights-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saccade-bench-weights\nVersion: 1\n", encoding="utf-8")
    entry = "[vllm.general_plugins]\nsaccade_bench_weights = benchmarks.against.vllm:register\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def register() -> None:
    """Replace vLLM's dummy weights by random weights with the scale of trained weights."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader import dummy_loader

    floats = (torch.bfloat16, torch.float16, torch.float32)

    def draw(path: str, module: torch.nn.Module, name: str, weight: torch.Tensor) -> None:
        table = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        if isinstance(module, torch.nn.LayerNorm):
            weight.fill_(1.0 if name == "weight" else 0.0)
        elif name in ("bias", "tau_alpha"):
            weight.zero_()
        elif weight.ndim >= 2 and (name == "pos_emb" or table):
            weight.normal_(0, 0.1)
        elif weight.ndim >= 2:
            weight.normal_(0, (3.0 if path.endswith("qkv_proj") else 1.0) * weight.shape[-1] ** -0.5)

    original = dummy_loader.DummyModelLoader.load_weights

    @torch.no_grad()
    def load_weights(self: Any, model: torch.nn.Module, config: Any) -> None:
        original(self, model, config)
        torch.manual_seed(0)
        for path, module in model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.device.type != "meta" and weight.dtype in floats and "scale" not in name:
                    draw(path, module, name, weight)

    dummy_loader.initialize_dummy_weights = lambda *_, **__: None
    dummy_loader.DummyModelLoader.load_weights = load_weights


def run_vllm(folder: str, requests: int) -> None:
    """Measure vLLM and print lines `["quantity", value]`."""
    import numpy as np
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=32,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 1},
        gpu_memory_utilization=0.8,
        disable_log_stats=True,
        seed=0,
    )
    dice = np.random.default_rng(0)

    def ask() -> dict[str, Any]:
        image = Image.fromarray(dice.integers(0, 256, (360, 640, 3), dtype=np.uint8))
        return {"prompt": _PROMPT, "multi_modal_data": {"image": image}}

    def took(prompts: list[dict[str, Any]], count: int) -> float:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        if not all(len(one.outputs[0].token_ids) == count for one in outputs):
            raise RuntimeError(f"vLLM generated fewer than {count} tokens")
        return seconds

    def emit(figure: str, value: float) -> None:
        print(json.dumps([figure, value]), flush=True)

    took([ask()], 16)  # compiles the kernels of both kinds of steps
    took([ask() for _ in range(40)], 9)
    for objects in _OBJECTS:
        emit(f"{objects} objects", 1000 * statistics.median(took([ask()], 3 * objects) for _ in range(requests)))
    for rows in _ROWS:
        steps = []
        for _ in range(4):
            ids = [{"prompt_token_ids": dice.integers(300, _VOCAB, _CONTEXT).tolist()} for _ in range(rows)]
            short, long = took(ids, _SHORT), took(ids, _LONG)
            steps.append(1000 * (long - short) / (_LONG - _SHORT))
        emit(f"decode step, {rows} rows", statistics.median(steps[1:]))
    images = [ask() for _ in range(320)]
    emit("32 images at a time, 3 objects", len(images) / took(images, 9))


if __name__ == "__main__":
    print(f"vLLM {metadata.version('vllm')}", file=sys.stderr)
    run_vllm(sys.argv[1], int(sys.argv[2]))
