"""Compares vLLM and Saccade on one GPU, on a model with random weights and the dimensions of Moondream 3.

Each measurement runs in a separate process, `python -m benchmarks.against.vllm`, which prints one JSON line per result.

vLLM's dummy weights are close to zero. With them, all tokens would be routed to the same few experts, and a decode step
would be too fast. The vLLM plugin `register` therefore draws weights like those of the model `moondream-3-random`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.against.harness import OURS, Comparison, Measured, begin, in_rounds, require, require_gpu
from saccade.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from saccade.engine import Engine

_MODEL = "moondream-3-random"
_OBJECTS = (1, 3, 5)  # an object is 3 tokens
_ROWS = (1, 8, 32)
_MOST = 32  # images at a time
_CONTEXT = 760  # of vLLM's decode steps; Saccade's begin at 742 keys
_SHORT, _LONG = 2, 42  # objects of answers whose difference is the time of 120 decode steps
_FIGURE_S = 60.0
_PROMPT = "<|endoftext|><image><|md_reserved_0|>detect<|md_reserved_1|>person<|md_reserved_2|>"  # 745 tokens, ours 742
_SPECIAL = ["<|endoftext|>", "<|md_reserved_0|>", "<|md_reserved_1|>", "<|md_reserved_2|>", "<|md_reserved_3|>"]
_VOCAB = 51_200
_END = "end\n"
_ROOT = Path(__file__).resolve().parents[2]
_MANY = f"{_MOST} images at a time, 3 objects"
_PREPROCESSED = f"{_MANY}, preprocessed before"
_UNITS = {
    **{f"{count} objects": "ms from image to answer" for count in _OBJECTS},
    _MANY: "images/s",
    _PREPROCESSED: "images/s",
    **{f"decode step, {rows} rows": "ms" for rows in _ROWS},
}
_NOTE = (
    "640×360, random images, random weights. vLLM's latency includes its preprocessing on the CPU (Pillow, 16 to 20 ms "
    "per image); Saccade preprocesses on the GPU. vLLM runs the bidirectional image prefix in Triton attention and the "
    "prefill without CUDA graphs. It has no tuned expert configuration for this shape. With fp8 its experts stay in "
    "bf16. FlashAttention 3 treats the image prefix as causal, which is wrong for this model. A decode step is wall "
    "time: the difference between answers of 126 and 6 tokens, divided by 120."
)


@dataclass(slots=True, frozen=True)
class Config:
    """Configuration with which Saccade and vLLM load the model.

    Attributes:
        dtype: dtype of Saccade's engine. The names of the results begin with it.
        side: title of vLLM's column in the table.
        options: additional arguments of `vllm.LLM`.
    """

    dtype: str
    side: str
    options: dict[str, Any]


CONFIGS = {
    "bf16": Config("bfloat16", "vLLM", {}),
    "bf16-fa3": Config("bfloat16", "vLLM, FlashAttention 3", {"hf_overrides": {"is_mm_prefix_lm": False}}),
    "fp8": Config("fp8", "vLLM", {"quantization": "fp8"}),
}


@dataclass(slots=True, frozen=True)
class Program:
    """Functions that measure Saccade or vLLM on a loaded model. Each returns a duration in seconds.

    Attributes:
        answer: detects objects in images. Arguments: number of images, number of objects per answer.
        decode: answers prompts in one batch. Arguments: number of prompts, number of objects per answer.
        answer_preprocessed: like `answer`, without image preprocessing, or None if it is not measurable.
    """

    answer: Callable[[int, int], float]
    decode: Callable[[int, int], float]
    answer_preprocessed: Callable[[int, int], float] | None = None


def compare(rounds: int, configs: Sequence[str], requests: int, images: int, limit_s: float) -> Comparison:
    """Compare Saccade with vLLM. Each measurement loads the model in a new process.

    Args:
        rounds: number of rounds.
        configs: names in `CONFIGS`.
        requests: number of images for a latency measurement.
        images: number of images for a throughput measurement.
        limit_s: time limit of a process, in seconds. The results before the limit are kept.

    Raises:
        ConfigError: if there is no GPU, if vLLM is missing, if a configuration is unknown, or if a process fails
            without any result.
    """
    if unknown := [name for name in configs if name not in CONFIGS]:
        raise ConfigError(f"--configs: unknown configuration {', '.join(unknown)}; use {', '.join(CONFIGS)}")
    require_gpu("the comparison with vLLM")
    require("vllm", install="vllm")

    def side(program: str, chosen: dict[str, Config]) -> Measured:
        found: dict[str, float] = {}
        for name, config in chosen.items():
            measured = run(program, name, requests, images, limit_s)
            found |= {f"{config.dtype}: {figure}": value for figure, value in measured.items()}
        return found

    picked = {name: CONFIGS[name] for name in configs}
    ours = dict[str, Config]()
    for name, config in picked.items():  # Saccade measures each dtype once
        if config.dtype not in (other.dtype for other in ours.values()):
            ours[name] = config
    sides = {OURS: partial(side, "saccade", ours)}
    for title in dict.fromkeys(config.side for config in picked.values()):
        theirs = {name: config for name, config in picked.items() if config.side == title}
        sides[title] = partial(side, "vllm", theirs)
    units = {f"{config.dtype}: {figure}": unit for config in ours.values() for figure, unit in _UNITS.items()}
    made = begin("vllm", "Moondream 3's dimensions: Saccade and vLLM", _NOTE, units, ("vllm",))
    return in_rounds(made, sides, rounds, warm_up=False)


def run(program: str, config: str, requests: int, images: int, limit_s: float) -> Measured:
    """Measure Saccade's or vLLM's latency and throughput in a new process. Print each result to stderr immediately.

    Args:
        program: `saccade` or `vllm`.
        config: name in `CONFIGS`.
        requests: number of images for a latency measurement.
        images: number of images for a throughput measurement.
        limit_s: seconds after which the process is stopped.

    Raises:
        ConfigError: if the process fails without any result.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if program == "vllm":
            write_model(folder / "model")
            write_plugin(folder)
        paths = os.pathsep.join([str(folder), str(_ROOT), os.environ.get("PYTHONPATH", "")])
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1")
        quiet = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "benchmarks.against.vllm", program, config, str(folder / "model")]
        process = subprocess.Popen(
            [*command, str(requests), str(images)],
            env={**os.environ, **offline, **quiet, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # vLLM's engine is a further process; both are stopped together
        )
        timer = threading.Timer(limit_s, _kill, [process])
        stop = time.monotonic() + limit_s  # before the timer starts, so that a killed process counts as stopped
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line == _END:
                    break  # vLLM's engine may hold the pipe open
                if line.startswith('["'):
                    figure, value = json.loads(line)
                    found[figure] = value
                    shown = {"program": program, "config": config, "figure": figure, "value": round(value, 3)}
                    print(json.dumps(shown), file=sys.stderr, flush=True)
            else:
                why = f"stopped after {limit_s:.0f} s" if time.monotonic() >= stop else "failed"
                print(f"{program}, {config}: {why}, before its last figure", file=sys.stderr)
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
    if not found:
        raise ConfigError(f"{program}, {config}: no result; see the messages above")
    return found


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def figures(program: Program, requests: int, images: int) -> Iterator[tuple[str, float]]:
    """Measure latency and throughput, and yield the name and value of each result.

    If a name is yielded again, the new value replaces the previous value.

    Args:
        program: functions that measure Saccade or vLLM.
        requests: number of images for a latency measurement.
        images: number of images for a throughput measurement.
    """
    program.answer(1, 5)  # compiles the kernels of both kinds of steps
    program.answer(_MOST + 8, 3)
    for objects in _OBJECTS:
        times = _repeat(partial(program.answer, 1, objects), requests)
        yield f"{objects} objects", 1000 * statistics.median(times)
    for name, answer in {_MANY: program.answer, _PREPROCESSED: program.answer_preprocessed}.items():
        if answer is None:
            continue
        seconds = answer(_MOST, 3)
        yield name, _MOST / seconds
        count = max(_MOST, min(images, int(_MOST * _FIGURE_S / seconds)))
        yield name, count / answer(count, 3)
    for rows in _ROWS:
        program.decode(rows, _SHORT)
        longer = statistics.median(_repeat(partial(program.decode, rows, _LONG), 3))
        shorter = statistics.median(_repeat(partial(program.decode, rows, _SHORT), 3))
        yield f"decode step, {rows} rows", 1000 * (longer - shorter) / (3 * (_LONG - _SHORT))


def _repeat(work: Callable[[], float], count: int) -> list[float]:
    """Call `work` up to `count` times within a time limit, at least once. Return the results."""
    stop = time.monotonic() + _FIGURE_S
    values = [work()]
    while len(values) < count and time.monotonic() < stop:
        values.append(work())
    return values


def write_model(folder: Path) -> None:
    """Write a model folder with the dimensions of Moondream 3: config, tokenizer and processor files, no weights."""
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
    """Write the package metadata of a vLLM plugin to `folder`. The plugin makes vLLM call `register` when it starts."""
    info = folder / "saccade_bench_weights-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saccade-bench-weights\nVersion: 1\n", encoding="utf-8")
    entry = "[vllm.general_plugins]\nsaccade_bench_weights = benchmarks.against.vllm:register\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def register() -> None:
    """Replace vLLM's dummy weights with random weights of the scale of trained weights (vLLM plugin)."""
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

    @torch.no_grad()
    def draw_quantized(weight: torch.Tensor, *_: Any, **__: Any) -> None:
        """Fill the weights of a linear layer with random values. vLLM quantizes them later."""
        if weight.device.type != "meta" and weight.dtype in floats:
            weight.normal_(0, weight.shape[-1] ** -0.5 if weight.ndim >= 2 else 0.0)  # a bias is zero

    original = dummy_loader.DummyModelLoader.load_weights

    @torch.no_grad()
    def load_weights(self: Any, model: torch.nn.Module, config: Any) -> None:
        original(self, model, config)
        torch.manual_seed(0)
        for path, module in model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.device.type != "meta" and weight.dtype in floats and "scale" not in name:
                    draw(path, module, name, weight)

    dummy_loader.initialize_single_dummy_weight = draw_quantized
    dummy_loader.initialize_dummy_weights = lambda *_, **__: None
    dummy_loader.DummyModelLoader.load_weights = load_weights


@contextmanager
def load_saccade(config: Config) -> Iterator[Program]:
    """Load the benchmark's model with random weights into Saccade. Yield the functions that measure it."""
    from saccade.engine.golden.random_model import random_engine

    with random_engine("cuda", config.dtype, name=_MODEL) as engine:
        yield saccade_program(engine)


def saccade_program(engine: Engine) -> Program:
    """Return the functions that measure Saccade."""
    import numpy as np

    from saccade.engine import Detect

    dice = np.random.default_rng(0)

    def answer(count: int, objects: int) -> float:
        task = Detect("person", objects, conf=0.0)
        images = [dice.integers(0, 256, (360, 640, 3), dtype=np.uint8) for _ in range(count)]
        done: queue.SimpleQueue[object] = queue.SimpleQueue()
        begun = time.perf_counter()
        futures = []
        for number, image in enumerate(images):
            if number >= _MOST:
                done.get()
            futures.append(engine.submit(image, [task]))
            futures[-1].call_when_done(done.put)
        found = [len(future.result().detections) for future in futures]
        seconds = time.perf_counter() - begun
        if found != [objects] * count:
            raise RuntimeError(f"Saccade must detect {objects} objects in each image; detected: {found}")
        return seconds

    return Program(answer, answer)


@contextmanager
def load_vllm(config: Config, folder: str) -> Iterator[Program]:
    """Load the model in `folder` with random weights into vLLM. Yield the functions that measure it."""
    import numpy as np
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=_MOST,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 1},
        gpu_memory_utilization=0.8,
        disable_log_stats=True,
        seed=0,
        **config.options,
    )
    dice = np.random.default_rng(0)

    def sampling(objects: int) -> SamplingParams:
        tokens = 3 * objects
        return SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)

    def ask(count: int) -> list[dict[str, Any]]:
        images = (Image.fromarray(dice.integers(0, 256, (360, 640, 3), dtype=np.uint8)) for _ in range(count))
        return [{"prompt": _PROMPT, "multi_modal_data": {"image": image}} for image in images]

    def timed(run: Callable[[], list[Any]], count: int, objects: int) -> float:
        begun = time.perf_counter()
        outputs = run()
        seconds = time.perf_counter() - begun
        if [len(one.outputs[0].token_ids) for one in outputs] != [3 * objects] * count:
            raise RuntimeError(f"vLLM did not generate exactly {3 * objects} tokens for each prompt")
        return seconds

    def generate(prompts: list[dict[str, Any]], objects: int) -> float:
        return timed(lambda: llm.generate(prompts, sampling(objects), use_tqdm=False), len(prompts), objects)

    def decode(rows: int, objects: int) -> float:
        ids = [{"prompt_token_ids": dice.integers(300, _VOCAB, _CONTEXT).tolist()} for _ in range(rows)]
        return generate(ids, objects)

    def preprocessed(count: int, objects: int) -> float:
        # vLLM has no public function for this; the names are those of 0.25.
        ready = [llm._preprocess_cmpl_one(prompt) for prompt in ask(count)]

        def run() -> list[Any]:
            llm._render_and_add_requests(iter(ready), [sampling(objects) for _ in ready])
            return list(llm.wait_for_completion(use_tqdm=False))

        return timed(run, count, objects)

    private = hasattr(llm, "_preprocess_cmpl_one") and hasattr(llm, "_render_and_add_requests")
    yield Program(lambda count, objects: generate(ask(count), objects), decode, preprocessed if private else None)


def _measure(program: str, config: str, folder: str, requests: int, images: int) -> None:
    """Benchmark one program (Saccade or vLLM) in this process. Print each metric as a JSON line `[name, value]`."""
    chosen = CONFIGS[config]
    loaded: AbstractContextManager[Program]
    loaded = load_vllm(chosen, folder) if program == "vllm" else load_saccade(chosen)
    with loaded as model:
        for figure, value in figures(model, requests, images):
            print(json.dumps([figure, value]), flush=True)
        print(_END, end="", flush=True)


if __name__ == "__main__":
    _, side, config_name, model_folder, request_count, image_count = sys.argv
    _measure(side, config_name, model_folder, int(request_count), int(image_count))
