"""Train nano on a data pack: `python -m saccade.engine.training.train --help`. One GPU, several by torchrun, or a CPU.

The schedule is in seconds, not steps: what is rented is time. A run that ends early leaves a checkpoint, and the next
one goes on from it. Results and what was tried: engine/training/README.md.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.csp_stem import CspStem
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.training.augment import Batch, make_batch, plain_batch
from saccade.engine.training.data import Split, load_split
from saccade.engine.training.import_stem import add_norms, fold_norms, load_start
from saccade.engine.training.regularise import add_drops
from saccade.engine.training.targets import (
    Answerer,
    answer_losses,
    choose_prompts,
    dense_losses,
    read_back,
    similar_classes,
)

N_PRESENT, N_ABSENT, N_OBJECTS = 2, 2, 16
WEIGHTS = {"start": 2.0, "x": 1.0, "y": 1.0, "w": 0.5, "h": 0.5, "heat": 1.0, "box": 1.0}
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
STARTED = time.monotonic()
SHARD = 15 << 20  # bytes of one checkpoint file
WARM, STEM_WARM = 0.02, 0.1  # parts of the schedule until the peak rate: what is new must not shake what is learned


def build(config: MoondreamConfig) -> Answerer:
    """A fresh model with its training heads."""
    model = Moondream(config)
    for parameter in (model.text.wte, model.vision.pos_emb):
        nn.init.normal_(parameter, std=0.02)
    nn.init.normal_(model.region.coord_features, std=6.0)
    nn.init.normal_(model.region.size_features, std=4.0)
    assert config.classes is not None
    return Answerer(model, len(config.classes), N_PRESENT + N_ABSENT, N_OBJECTS)


def groups(answerer: Answerer, rate: float, stem_rate: float, decay: float) -> list[dict[str, Any]]:
    """Optimiser groups: the stem's convolutions learn later and less, at `stem_rate` of the rate; norms, biases and
    embeddings do not decay.
    """  # noqa: D205
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in answerer.named_parameters():
        stem = ".stem." in name and not any(part in name for part in (".fine.", ".middle.", ".coarse."))
        bare = parameter.ndim < 2 or any(part in name for part in ("wte", "pos_emb", "_features"))
        found.setdefault((stem, bare), []).append(parameter)
    return [
        {
            "params": params,
            "peak": rate * (stem_rate if stem else 1.0),
            "warm": STEM_WARM if stem else WARM,
            "weight_decay": 0.0 if bare else decay,
        }
        for (stem, bare), params in found.items()
    ]


def rate_at(progress: float, warm: float) -> float:
    """Part of the peak learning rate at a part of the schedule: a straight line up until `warm`, then half a cosine."""
    return progress / warm if progress < warm else 0.5 * (1 + math.cos(math.pi * (progress - warm) / (1 - warm)))


class Trainer:
    """Everything one process needs: data on its GPU, model, optimiser, average of the weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if gpu else "gloo")
        args.out.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:  # beside the weights to come, these make the folder a model
            for path in args.config.parent.glob("*.json"):
                shutil.copyfile(path, args.out / path.name)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(0)
        self.config = MoondreamConfig.from_file(args.config)
        workers = max(1, (os.cpu_count() or 2) // self.world)
        self.train = load_split(args.data, "train", workers).to(self.device)
        self.val = load_split(args.data, "val", workers).to(self.device)
        assert self.train.classes == self.config.classes
        tokenizer = Tokenizer.from_file(str(args.config.with_name("tokenizer.json")))
        ids = [tokenizer.encode(f" {name}").ids[0] for name in self.train.classes]
        self.words = torch.tensor(ids, device=self.device)
        self.answerer = build(self.config).to(self.device)
        stem = self.answerer.model.vision.stem
        assert isinstance(stem, CspStem)
        load_start(stem, load_file(args.stem))
        sample = torch.linspace(0, len(self.train.images) - 1, 64).long().to(self.device)
        add_norms(stem, plain_batch(self.train, sample, self.config.vision.crop_size).images)
        if self.world > 1:
            for tensor in floats(self.answerer):
                dist.broadcast(tensor, 0)
        stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        add_drops(self.answerer.model, args.drop)
        self.average = copy.deepcopy(self.answerer).eval().requires_grad_(False)
        self.optimiser = torch.optim.AdamW(
            groups(self.answerer, args.rate, args.stem_rate, args.decay), betas=(0.9, 0.98), fused=True
        )
        self.forward: Forward = torch.compile(self.answerer) if args.compile else self.answerer
        self.similar = similar_classes(self.train.classes, self.device)
        self.picture_weights, self.shares = balance(self.train)
        self.seconds = 0.0
        self.step = 0
        self.say("loaded")
        if args.resume:
            self.restore(args.resume)
        torch.manual_seed(1000 * self.step + self.rank)

    def say(self, what: str) -> None:
        """Print when a stage is over, in seconds from the start of the process."""
        if self.rank == 0:
            print(f"{what} after {time.monotonic() - STARTED:.0f} s", flush=True)

    def loss(self, batch: Batch, forward: Forward, noise: float) -> dict[str, torch.Tensor]:
        """All losses of one batch by name."""
        prompts = choose_prompts(batch, self.shares, self.similar, N_PRESENT, N_ABSENT, N_OBJECTS)
        n_classes = len(self.train.classes)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            images = batch.images.contiguous(memory_format=torch.channels_last)
            words = self.words[prompts.classes]
            hidden, dense = forward(images, words, prompts.points, read_back(prompts.boxes, noise))
            losses = answer_losses(self.answerer, hidden, prompts, room=len(images) * 12)
        return losses | dense_losses(dense, batch, n_classes)

    def train_step(self) -> dict[str, torch.Tensor]:
        """One optimiser step on a random batch."""
        index = torch.multinomial(self.picture_weights, self.args.batch, replacement=True)
        progress = min(1.0, self.seconds / self.args.budget)
        mosaic = self.args.mosaic if progress < 0.9 else 0.0  # the last tenth sees pictures as they come
        batch = make_batch(self.train, index, self.config.vision.crop_size, mosaic)
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak"] * rate_at(progress, group["warm"])
        losses = self.loss(batch, self.forward, noise=0.04)
        total = torch.stack([WEIGHTS[name] * value for name, value in losses.items()]).sum()
        self.optimiser.zero_grad(set_to_none=True)
        total.backward()
        parameters = [p for p in self.answerer.parameters() if p.grad is not None]
        if self.world > 1:
            share_gradients(parameters, self.world)
        nn.utils.clip_grad_norm_(parameters, 2.0)
        self.optimiser.step()
        self.step += 1
        keep = min(self.args.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            ours, theirs = floats(self.average), floats(self.answerer)
            torch._foreach_lerp_(ours, theirs, 1 - keep)
        return losses

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Losses of the averaged weights on the val split, with the true answers given."""
        sums: dict[str, float] = {}
        chunks = torch.arange(len(self.val.images), device=self.device).split(454)
        held = self.answerer
        self.answerer = self.average
        torch.manual_seed(7)
        for index in chunks:
            batch = plain_batch(self.val, index, self.config.vision.crop_size)
            for name, value in self.loss(batch, self.average, noise=0.0).items():
                sums[name] = sums.get(name, 0.0) + value.item() / len(chunks)
        self.answerer = held
        torch.manual_seed(1000 * self.step + self.rank)
        return sums

    def run(self) -> None:
        """Train until this run's or the whole schedule's time is over, then leave a checkpoint and the weights."""
        args, offset = self.args, self.seconds
        self.train_step()  # compiles, outside the schedule
        self.synchronise()
        self.say("compiled")
        began = time.monotonic()
        sums: dict[str, torch.Tensor] = {}
        last_step, last_time, due = self.step, began, began + args.report
        while True:
            losses = self.train_step()
            for name, value in losses.items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value.detach()
            if self.step % 10 == 0:
                self.synchronise()
                self.seconds = offset + time.monotonic() - began
                if self.world > 1:  # all ranks must take the same decision
                    clock = torch.tensor([self.seconds], device=self.device)
                    dist.broadcast(clock, 0)
                    self.seconds = clock.item()
                now = began + self.seconds - offset
                over = self.seconds - offset >= args.stop_after or self.seconds >= args.budget
                if now >= due or over:
                    steps = self.step - last_step
                    if self.rank == 0:
                        pace = steps * args.batch * self.world / (now - last_time)
                        line = {name: round(value.item() / steps, 3) for name, value in sums.items()}
                        val = {name: round(value, 3) for name, value in self.validate().items()}
                        print(
                            json.dumps({"s": round(self.seconds), "step": self.step, "pace": round(pace)}), flush=True
                        )
                        print("   train", json.dumps(line), flush=True)
                        print("   val  ", json.dumps(val), flush=True)
                        export(self.average.model, args.out / f"model.{self.seconds:04.0f}s.safetensors")
                    sums, last_step, last_time, due = {}, self.step, time.monotonic(), now + args.report
                if over:
                    break
        if self.rank == 0:
            self.save(args.out)
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def synchronise(self) -> None:
        """Wait until the GPU has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def save(self, folder: Path) -> None:
        """Leave `model.safetensors` (averaged weights, norms folded, float16) and the shards of a checkpoint."""
        export(self.average.model, folder / "model.safetensors")
        optimiser = self.optimiser.state_dict()
        for state in optimiser["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].bfloat16()
        buffer = io.BytesIO()
        torch.save(
            {
                "answerer": self.answerer.state_dict(),
                "average": self.average.state_dict(),
                "optimiser": optimiser,
                "seconds": self.seconds,
                "step": self.step,
            },
            buffer,
        )
        data = buffer.getvalue()
        for i in range(0, len(data), SHARD):
            (folder / f"checkpoint.{i // SHARD:02d}").write_bytes(data[i : i + SHARD])

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint that `save` left."""
        data = b"".join(path.read_bytes() for path in sorted(folder.glob("checkpoint.*")))
        state = torch.load(io.BytesIO(data), map_location=self.device, weights_only=True)
        self.answerer.load_state_dict(state["answerer"])
        self.average.load_state_dict(state["average"])
        for entry in state["optimiser"]["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = entry[key].float()
        peaks = [group["peak"] for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict(state["optimiser"])
        for group, peak in zip(self.optimiser.param_groups, peaks, strict=True):
            group["peak"] = peak
        self.seconds, self.step = state["seconds"], state["step"]


def floats(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and running statistics, without the integer counters."""
    return [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]


def share_gradients(parameters: list[nn.Parameter], world: int) -> None:
    """Average the gradients over all processes, as one message."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat.div_(world)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def balance(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """How often to draw each picture (N,), rare classes more; and the part of pictures with each class (classes,)."""
    n_classes = len(split.classes)
    present = torch.zeros(len(split.images), n_classes, device=split.images.device)
    present.scatter_reduce_(1, split.labels.clamp(min=0), split.sure.float(), "amax")
    share = present.mean(0).clamp(min=1e-4)
    repeat = (0.06 / share).sqrt().clamp(1.0, 4.0)
    pictures = (present * repeat).amax(1).clamp(min=0.7)
    return pictures, share


def export(model: Moondream, path: Path) -> None:
    """Write the weights that run: norms folded, float16, published names."""
    plain = copy.deepcopy(model)
    assert isinstance(plain.vision.stem, CspStem)
    plain.vision.stem = fold_norms(plain.vision.stem)
    save_file({f"model.{name}": t.half().contiguous().cpu() for name, t in plain.state_dict().items()}, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).resolve().parents[1] / "models" / "nano"
    parser.add_argument("--data", type=Path, required=True, help="folder of the data pack")
    parser.add_argument("--config", type=Path, default=here / "config.json", help="beside tokenizer.json")
    parser.add_argument("--stem", type=Path, required=True, help="the stem's start, from training.import_stem")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and checkpoint")
    parser.add_argument("--resume", type=Path, help="folder with a checkpoint to go on from")
    parser.add_argument("--budget", type=float, default=420, help="seconds of the whole schedule")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds of this run")
    parser.add_argument("--report", type=float, default=30, help="seconds between two reports")
    parser.add_argument("--batch", type=int, default=256, help="pictures a step and GPU")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--stem-rate", type=float, default=0.1, help="part of it that the stem's convolutions have")
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--drop", type=float, default=0.1, help="chance of leaving out a block or a token in training")
    parser.add_argument("--average", type=float, default=0.999, help="decay of the weights' moving average")
    parser.add_argument("--mosaic", type=float, default=0.4, help="part of the pictures shown four at a time")
    parser.add_argument("--compile", action="store_true", help="a third faster, after two minutes")
    Trainer(parser.parse_args(arguments)).run()


if __name__ == "__main__":
    main()
