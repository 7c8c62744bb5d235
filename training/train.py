"""Trains Saccade's model "nano" on a dataset folder: `python -m training.train --help`. Supports torchrun.

Each iteration trains the detector on a batch of augmented images, and then the text decoder on the detections. The
schedule is in seconds instead of steps, to fit a budget of GPU time. Each run ends with a checkpoint, from which the
next run can resume.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.engine.models.nano.picodet import Evidence, PicoDet
from training.answers import Answerer, answer_losses, choose, judge, read_back, similar_classes
from training.augment import Batch, make_batch
from training.copying import wire
from training.data import Split, load_split
from training.detector_losses import detector_losses
from training.import_picodet import COCO, NANO, convert

N_PROMPTS, N_OBJECTS = 5, 24
WEIGHTS = {"classes": 1.0, "boxes": 2.0, "bins": 0.25, "keep": 0.5}
WEIGHTS |= {"judge": 1.0, "start": 2.0, "x": 1.0, "y": 1.0, "w": 0.5, "h": 0.5}
WIDE = 8 / 13  # rows of a view of a landscape image, in columns: 256 of 416
LARGE = 20 / 13  # columns of a large view: 640 where a view has 416
STARTED = time.monotonic()
SHARD = 15 << 20  # bytes of one checkpoint file
WARM = 0.03  # part of the schedule until the peak rate


def build(config: MoondreamConfig, start: dict[str, torch.Tensor], words: torch.Tensor) -> tuple[Moondream, PicoDet]:
    """Return a model with a detector pretrained on COCO, and a frozen copy of the detector as distillation teacher."""
    assert config.classes is not None
    model = Moondream(config)
    tower = model.vision
    assert isinstance(tower, DetectorTower)
    nn.init.zeros_(tower.judge.fc2.weight)
    nn.init.zeros_(tower.judge.fc2.bias)
    tower.stem.load_state_dict(start)
    wire(model, words)
    return model, copy.deepcopy(tower.stem).eval().requires_grad_(False)


def rate_at(progress: float, warm: float) -> float:
    """Return the learning rate relative to its peak: a linear warm-up, then a cosine decay to 2 %.

    Args:
        progress: position in the schedule, from 0 to 1.
        warm: end of the warm-up, from 0 to 1.
    """
    if progress < warm:
        return progress / warm
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (progress - warm) / (1 - warm)))


class Trainer:
    """State of one training process: dataset, model, optimizers, and moving average of the weights."""

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
        self.train = load_split(args.data, "train", workers, args.limit).to(self.device)
        classes = self.train.classes
        assert classes == self.config.classes
        tokenizer = Tokenizer.from_file(str(args.config.with_name("tokenizer.json")))
        self.words = torch.tensor([tokenizer.encode(f" {name}").ids[0] for name in classes], device=self.device)
        vision = self.config.vision
        weights = convert(load_file(args.coco), classes, vision.n_boxes)
        model, start = build(self.config, weights, self.words.cpu())
        self.start = start.to(self.device)
        self.answerer = Answerer(model, N_PROMPTS, N_OBJECTS).to(self.device)
        self.known = torch.tensor([name in COCO for name in classes], device=self.device)
        self.wide = ((self.train.sizes[:, 0] / self.train.sizes[:, 1]) > 1.45).float()
        self.has_wide = bool(self.wide.any())
        self.similar = similar_classes(classes, self.device)
        self.image_weights = balance(self.train)
        self.seconds, self.step = 0.0, 0
        if args.resume:
            self.state = read_checkpoint(args.resume, self.device)
            if args.restart:  # from the average; what the checkpoint lacks begins as ever
                self.answerer.load_state_dict(self.state["average"], strict=False)
            else:
                self.answerer.load_state_dict(self.state["answerer"])
        if self.world > 1:
            for tensor in floats(self.answerer):
                dist.broadcast(tensor, 0)
        if args.channels_last:
            self.start.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.tower.stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.answerer).eval().requires_grad_(False)
        self.detector_optimiser = self.optimiser(self.tower.stem, self.detector_rate, 0.02)
        decoder = nn.ModuleList([self.answerer])
        self.decoder_optimiser = self.optimiser(decoder, self.decoder_rate, args.decay)
        if args.resume and not args.restart:
            self.average.load_state_dict(self.state["average"])
            self.restore()
        self.say("loaded")
        torch.manual_seed(1000 * self.step + self.rank)

    @property
    def tower(self) -> DetectorTower:
        """The model's vision encoder, which contains the detector."""
        tower = self.answerer.model.vision
        assert isinstance(tower, DetectorTower)
        return tower

    def detector_rate(self, name: str) -> float:
        """Return the peak learning rate of a detector parameter: higher for heads than for backbone and neck."""
        rate = float(self.args.detector_rate)
        return rate * 4 if ".out." in name else rate * 2 if "heads." in name else rate

    def decoder_rate(self, name: str) -> float:
        """Return the peak learning rate of a model parameter outside the detector, or 0 for a detector parameter."""
        return 0.0 if ".stem." in name else float(self.args.rate)

    def optimiser(self, module: nn.Module, rate: Any, decay: float) -> torch.optim.AdamW:
        """Return an AdamW optimizer with one parameter group per learning rate.

        Normalization parameters, biases and embeddings have no weight decay.
        """
        found: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            bare = parameter.ndim < 2 or any(part in name for part in ("wte", "pos_emb", "_features", "label"))
            if peak := rate(name):
                found.setdefault((peak, bare), []).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": params, "peak": peak, "weight_decay": 0.0 if bare else decay}
            for (peak, bare), params in found.items()
        ]
        groups = groups or [{"params": [], "peak": 0.0, "weight_decay": 0.0}]  # frozen
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=self.device.type == "cuda")

    def say(self, what: str) -> None:
        """Print a message with the seconds since the start of the process."""
        if self.rank == 0:
            print(f"{what} after {time.monotonic() - STARTED:.0f} s", flush=True)

    def autocast(self) -> torch.autocast:
        """Return a context manager for mixed precision (bfloat16), which is enabled only on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def batch(self, progress: float) -> Batch:
        """Return a random batch of augmented images.

        All images of a batch have the same size; the resolution and the aspect ratio differ between batches.
        """
        args, size = self.args, self.config.vision.crop_size
        if args.large and torch.rand((), generator=self.shapes).item() < args.large:
            size = round(size * LARGE / 32) * 32
        wide = torch.rand((), generator=self.shapes).item() < args.wide and self.has_wide
        weights = self.image_weights * self.wide if wide else self.image_weights
        index = torch.multinomial(weights, args.batch, replacement=True)
        mosaic = args.mosaic if progress < 0.9 else 0.0  # the last tenth sees images as they come
        shape = (round(size * WIDE / 32) * 32 if wide else size), size
        batch = make_batch(self.train, index, shape, mosaic, 40, args.far)
        images = batch.images.to(torch.bfloat16) if self.device.type == "cuda" else batch.images
        order = torch.channels_last if args.channels_last else torch.contiguous_format
        batch.images = images.contiguous(memory_format=order)
        return batch

    def train_step(self, progress: float) -> dict[str, torch.Tensor]:
        """Train the detector and then the text decoder on a random batch. Return the losses by name."""
        batch = self.batch(progress)
        for optimiser in (self.detector_optimiser, self.decoder_optimiser):
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rate_at(progress, WARM)
        losses = {}
        with self.autocast():
            if self.args.detector_rate:
                seen = self.tower.stem(batch.images)
                with torch.no_grad():
                    start = self.start(batch.images)
            else:
                with torch.no_grad():
                    seen = self.tower.stem(batch.images)
        if self.args.detector_rate:
            losses = detector_losses(seen, start, batch, self.config.vision.part_class, self.known)
            self.learn(losses, self.detector_optimiser)
        evidence = Evidence(*(part.detach().float() for part in (seen.features, seen.classes, seen.sides, seen.grid)))
        with torch.no_grad():
            finds = self.tower.find(evidence, *batch.images.shape[2:])
            right = judge(finds, batch)
        n, tower = len(batch.images), self.tower
        for first in range(0, n, self.args.part):
            rows = slice(first, min(n, first + self.args.part))
            part = Batch(batch.images, batch.boxes[rows], batch.labels[rows], batch.sure[rows], batch.unknown[rows])
            found = type(finds)(*(getattr(finds, name)[rows] for name in finds.__slots__))
            reported = Evidence(*(getattr(evidence, name)[rows] for name in evidence.__slots__))
            judged = tower.judge(found.traits, found.labels)
            answers = choose(found, part, self.similar, N_PROMPTS, N_OBJECTS, (right[0][rows], right[1][rows]))
            with self.autocast():
                tokens = tower.tokens(reported, found)
                hidden = self.answerer(
                    tokens, self.words[answers.classes], answers.points, read_back(answers.boxes, 0.004)
                )
                answered = answer_losses(self.answerer, hidden, answers, room=self.args.part * 32)
            right_rows, weight_rows = right[0][rows], right[1][rows] * found.alive
            wrong = F.binary_cross_entropy_with_logits(judged, right_rows, reduction="none") * weight_rows
            answered["judge"] = wrong.sum() / weight_rows.sum().clamp(min=1)
            self.learn(answered, self.decoder_optimiser)
            losses |= answered
        self.step += 1
        keep = min(self.args.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(floats(self.average), floats(self.answerer), 1 - keep)
        return losses

    def learn(self, losses: dict[str, torch.Tensor], optimiser: torch.optim.AdamW) -> None:
        """Run one optimizer step on the weighted sum of losses."""
        total = torch.stack([WEIGHTS[name] * value for name, value in losses.items() if name in WEIGHTS]).sum()
        optimiser.zero_grad(set_to_none=True)
        total.backward()
        parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        if self.world > 1:
            share_gradients(parameters, self.world)
        nn.utils.clip_grad_norm_(parameters, 2.0)
        optimiser.step()

    def run(self) -> None:
        """Train until the schedule ends or `--stop-after` seconds have passed. Then save weights and a checkpoint."""
        args, offset = self.args, self.seconds
        self.shapes = torch.Generator().manual_seed(self.step)  # all processes draw the same shapes
        self.train_step(min(1.0, offset / args.budget))  # loads kernels, outside the schedule
        self.synchronise()
        self.say("first step")
        began = time.monotonic()
        sums: dict[str, torch.Tensor] = {}
        last_step, last_time, due = self.step, began, began + args.report
        exports = 0
        while True:
            for name, value in self.train_step(min(1.0, self.seconds / args.budget)).items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value.detach()
            if self.step % args.check == 0:
                self.synchronise()
                self.seconds = offset + time.monotonic() - began
                if self.world > 1:  # all processes must take the same decision
                    clock = torch.tensor([self.seconds], device=self.device)
                    dist.broadcast(clock, 0)
                    self.seconds = clock.item()
                now = began + self.seconds - offset
                over = self.seconds - offset >= args.stop_after or self.seconds >= args.budget
                if now >= due or over:
                    steps = self.step - last_step
                    if self.rank == 0:
                        pace = steps * args.batch * self.world / max(now - last_time, 1e-3)
                        line = {name: round(value.item() / max(steps, 1), 3) for name, value in sums.items()}
                        head = {"s": round(self.seconds), "step": self.step, "pace": round(pace)}
                        print(json.dumps(head | line), flush=True)
                        if (exports := exports + 1) % args.keep == 0:
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
        """Wait until the GPU has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def save(self, folder: Path) -> None:
        """Save the averaged weights in `model.safetensors` (float16), and the training state in checkpoint files."""
        export(self.average.model, folder / "model.safetensors")
        optimisers = [self.detector_optimiser.state_dict(), self.decoder_optimiser.state_dict()]
        for optimiser in optimisers:
            for state in optimiser["state"].values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].bfloat16()
        buffer = io.BytesIO()
        torch.save(
            {
                "answerer": self.answerer.state_dict(),
                "average": self.average.state_dict(),
                "optimisers": optimisers,
                "seconds": self.seconds,
                "step": self.step,
            },
            buffer,
        )
        data = buffer.getvalue()
        for i in range(0, len(data), SHARD):
            (folder / f"checkpoint.{i // SHARD:02d}").write_bytes(data[i : i + SHARD])

    def restore(self) -> None:
        """Restore the optimizer state and the elapsed time from the checkpoint, but not the peak learning rates."""
        optimisers = (self.detector_optimiser, self.decoder_optimiser)
        for optimiser, held in zip(optimisers, self.state["optimisers"], strict=True):
            if len(optimiser.param_groups) != len(held["param_groups"]):
                continue  # frozen before, or now
            for entry in held["state"].values():
                for key in ("exp_avg", "exp_avg_sq"):
                    entry[key] = entry[key].float()
            peaks = [group["peak"] for group in optimiser.param_groups]
            optimiser.load_state_dict(held)
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["peak"] = peak
        self.seconds, self.step = self.state["seconds"], self.state["step"]


def read_checkpoint(folder: Path, device: torch.device) -> dict[str, Any]:
    """Return the checkpoint in a folder, or only the weights in `model.safetensors` if there is no checkpoint."""
    if not any(folder.glob("checkpoint.*")):
        return {"average": load_file(folder / "model.safetensors", device=str(device))}
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("checkpoint.*")))
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    return state


def floats(module: nn.Module) -> list[torch.Tensor]:
    """Return all floating-point parameters and buffers of a module."""
    return [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]


def share_gradients(parameters: list[nn.Parameter], world: int) -> None:
    """Average the gradients over all processes in one all-reduce."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat.div_(world)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def balance(split: Split) -> torch.Tensor:
    """Return sampling weights (N,) of the images. Images with rare classes have higher weights."""
    present = torch.zeros(len(split.images), len(split.classes), device=split.images.device)
    present.scatter_reduce_(1, split.labels.clamp(min=0), split.sure.float(), "amax")
    share = present.mean(0).clamp(min=1e-4)
    repeat = (0.06 / share).sqrt().clamp(1.0, 4.0)
    return (present * repeat).amax(1).clamp(min=0.7)


def export(model: Moondream, path: Path) -> None:
    """Write the weights of a model as float16 to a safetensors file, for inference."""
    save_file({f"model.{name}": t.half().contiguous().cpu() for name, t in model.state_dict().items()}, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command-line arguments and train the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder")
    parser.add_argument(
        "--config", type=Path, default=NANO / "config.json", help="config.json of the model, next to tokenizer.json"
    )
    parser.add_argument(
        "--coco", type=Path, required=True, help="initial weights of the detector, start-picodet-s.safetensors"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the exported weights and the checkpoint")
    parser.add_argument(
        "--resume", type=Path, help="folder with a checkpoint to continue, or with a model if --restart is set"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with --resume: load only the weights, and start a new learning-rate schedule",
    )
    parser.add_argument(
        "--budget", type=float, default=420, help="duration of the whole learning-rate schedule, in seconds"
    )
    parser.add_argument("--stop-after", type=float, default=1e9, help="duration of this run, in seconds")
    parser.add_argument("--report", type=float, default=20, help="seconds between two reports")
    parser.add_argument("--keep", type=int, default=6, help="reports between two exports")
    parser.add_argument("--check", type=int, default=5, help="optimizer steps between two checks of the elapsed time")
    parser.add_argument(
        "--batch", type=int, default=128, help="augmented images per optimizer step of the detector, on each GPU"
    )
    parser.add_argument("--part", type=int, default=32, help="augmented images per optimizer step of the decoder")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate of the decoder")
    parser.add_argument(
        "--detector-rate",
        type=float,
        default=1e-4,
        help="peak learning rate of the detector's backbone and neck; 0 freezes the detector",
    )
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--average", type=float, default=0.998, help="decay of the weights' moving average")
    parser.add_argument(
        "--mosaic", type=float, default=0.35, help="fraction of the augmented images that combine four images (mosaic)"
    )
    parser.add_argument(
        "--far", type=float, default=0.0, help="fraction of the augmented images that combine four shrunk images"
    )
    parser.add_argument(
        "--large",
        type=float,
        default=0.0,
        help="fraction of the batches with an input size of 640 instead of 416 pixels",
    )
    parser.add_argument("--wide", type=float, default=0.3, help="fraction of the batches with wide images")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--limit", type=int, help="use only the first N images")
    Trainer(parser.parse_args(arguments)).run()


if __name__ == "__main__":
    main()
