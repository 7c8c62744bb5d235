"""Training targets and losses for the text decoder of the model "nano".

A prompt asks for the objects of one class. The target output lists the boxes of this class that the model's own
detector found, with a score of 1 for each correct box and 0 for each false one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.region import size_bin, size_value
from saccade.engine.models.nano.detector_tower import CropDetections
from training.augment import Batch
from training.detector_losses import iou

# Classes that are easily taken for each other: a good negative prompt comes from the same group.
_GROUPS = (
    ("bicycle", "car", "motorcycle", "bus", "truck", "train", "boat", "airplane"),
    ("cat", "dog", "bird", "horse", "sheep", "cow"),
    ("backpack", "handbag", "suitcase", "umbrella"),
    ("chair", "couch", "dining table", "potted plant", "tv", "laptop", "book", "bottle", "cup", "cell phone"),
    ("person", "face"),
)
_PROMOTED = 0.45  # of the detector: a doubtful box that it finds this surely is taken for right, at half weight


@dataclass(slots=True)
class Answers:
    """Training targets for the text decoder: P prompts on each of B images, with up to O objects per prompt.

    Attributes:
        classes: (B, P) int64 class ID of each prompt.
        points: (B, P) bool, True for a point prompt.
        boxes: (B, P, O, 4) float, cx cy w h as fractions of the image, best detection first.
        count: (B, P) int64 number of objects per prompt.
        right: (B, P, O) float target for the score of each object: 1 if its box is correct, else 0.
        weight: (B, P, O) float loss weight of the score; 0 for padding and unlabelled classes.
    """

    classes: torch.Tensor
    points: torch.Tensor
    boxes: torch.Tensor
    count: torch.Tensor
    right: torch.Tensor
    weight: torch.Tensor


def similar_classes(classes: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """Return (classes, classes) bool, True for pairs of classes that look similar, such as cat and dog."""
    table = torch.zeros(len(classes), len(classes), dtype=torch.bool)
    for group in _GROUPS:
        members = torch.tensor([classes.index(name) for name in group if name in classes], dtype=torch.int64)
        table[members.unsqueeze(1), members] = True
    return table.to(device)


def judge(finds: CropDetections, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare detections with the labels of the images.

    Args:
        finds: K detections in each of B images.
        batch: the B images with their labels.

    Returns:
        (B, K) float score targets, 1 for correct detections and 0 for false ones; and (B, K) float loss weights.
    """
    centre, size = batch.boxes[..., :2], batch.boxes[..., 2:]
    low, high = centre - size / 2, centre + size / 2
    truth = torch.cat([low, high], dim=-1).unsqueeze(1)
    found = finds.boxes.unsqueeze(2)
    same = finds.labels.unsqueeze(2) == batch.labels.unsqueeze(1)  # (B, K, M)
    overlap = iou(found, truth)
    sure = torch.where(same & batch.sure.unsqueeze(1), overlap, 0.0)
    value, which = sure.max(2)
    hit = (value > 0.5) & finds.alive
    # Of several finds of one box the first is right; K is in order.
    claims = hit.unsqueeze(2) & (which.unsqueeze(2) == torch.arange(sure.shape[2], device=sure.device))
    first = (claims & (claims.cumsum(1) == 1)).any(2)
    shared = (torch.minimum(found[..., 2:], truth[..., 2:]) - torch.maximum(found[..., :2], truth[..., :2])).clamp(
        min=0
    )
    within = shared.prod(-1) / (found[..., 2:] - found[..., :2]).clamp(min=1e-6).prod(-1)
    doubtful = (same & ~batch.sure.unsqueeze(1) & ((overlap > 0.5) | (within > 0.6))).any(2) & ~first
    promoted = doubtful & (finds.logits.sigmoid() > _PROMOTED)
    unknown = batch.unknown.gather(1, finds.labels)
    weight = torch.where(doubtful & ~promoted, 0.0, torch.where(promoted, 0.5, 1.0)) * ~unknown
    return (first | promoted).float(), weight


def choose(
    finds: CropDetections,
    batch: Batch,
    similar: torch.Tensor,
    n_prompts: int,
    n_objects: int,
    judged: tuple[torch.Tensor, torch.Tensor],
) -> Answers:
    """Choose random prompts for each of B augmented images, and return their training targets.

    Most prompts ask for classes in the image or for similar-looking classes. One prompt asks for an absent class.

    Args:
        finds: detections in the images.
        batch: the images with their labels.
        similar: (classes, classes) bool, True for similar-looking classes; see `similar_classes`.
        n_prompts: number of prompts per image.
        n_objects: maximum number of objects per prompt.
        judged: score targets and loss weights of the detections; see `judge`.
    """
    n_classes, device = len(similar), similar.device
    one_hot = F.one_hot(batch.labels.clamp(min=0), n_classes).bool() & (batch.labels >= 0).unsqueeze(-1)
    present = (one_hot & batch.sure.unsqueeze(-1)).any(1)
    named = one_hot.any(1) | batch.unknown
    heard = F.one_hot(finds.labels, n_classes).bool() & (finds.alive & (finds.logits > -2.2)).unsqueeze(-1)
    near = (present.float() @ similar.float()) > 0
    gumbel = -torch.log(torch.empty(present.shape, device=device).exponential_())
    wish = gumbel + 4.0 * present + 3.0 * heard.any(1) + near - 2.0 * batch.unknown
    most = wish.topk(n_prompts - 1, dim=1).indices
    absent = torch.where(named, -1e3, gumbel + near).scatter(1, most, -1e4).argmax(1, keepdim=True)
    classes = torch.cat([most, absent], dim=1)

    mine = (finds.labels.unsqueeze(1) == classes.unsqueeze(-1)) & finds.alive.unsqueeze(1)  # (B, P, K)
    rank = torch.arange(mine.shape[2], 0, -1, device=device)
    top = torch.where(mine, rank, 0).topk(n_objects, dim=2)
    valid = top.values > 0

    def pick(values: torch.Tensor) -> torch.Tensor:
        return values.unsqueeze(1).expand(-1, n_prompts, -1).gather(2, top.indices)

    corners = finds.boxes.unsqueeze(1).expand(-1, n_prompts, -1, -1)
    corners = corners.gather(2, top.indices.unsqueeze(-1).expand(-1, -1, -1, 4))
    low, high = corners.split(2, dim=-1)
    right, weight = judged
    points = torch.rand(classes.shape, device=device) < 0.12
    return Answers(
        classes,
        points,
        torch.cat([(low + high) / 2, high - low], dim=-1),
        valid.sum(2),
        pick(right),
        pick(weight) * valid,
    )


def sequence_mask(prefix: int, prompts: int, length: int) -> torch.Tensor:
    """Return a square bool attention mask for an image prefix followed by several prompts. True allows attention.

    Each position of a prompt attends to the prefix and to earlier positions of the same prompt.
    """
    total = prefix + prompts * length
    group = torch.full((total,), -1)
    group[prefix:] = torch.arange(prompts).repeat_interleave(length)
    at = torch.arange(total)
    same = (group.unsqueeze(1) == group) & (at.unsqueeze(1) >= at)
    return same | (group == -1)


class Answerer(nn.Module):
    """Forward pass of the text decoder for training: maps image tokens, prompts and answers to hidden states."""

    def __init__(self, model: Moondream, n_prompts: int, n_objects: int) -> None:
        super().__init__()
        self.model, self.n_prompts, self.n_objects = model, n_prompts, n_objects
        templates = model.config.tokenizer.templates
        heads = [templates["detect"]["prefix"], templates["point"]["prefix"]]
        self.n_head, self.suffix = len(heads[0]), len(templates["detect"]["suffix"])
        self.register_buffer("openings", torch.tensor(heads), persistent=False)
        self.register_buffer("endings", torch.tensor(templates["detect"]["suffix"]), persistent=False)
        self.length = self.n_head + 1 + self.suffix + 3 * n_objects - 1
        prefix = model.config.text.prefix_attn
        self.register_buffer("mask", sequence_mask(prefix, n_prompts, self.length), persistent=False)
        at = torch.cat([torch.arange(prefix), prefix + torch.arange(self.length).repeat(n_prompts)])
        self.register_buffer("positions", at.unsqueeze(0), persistent=False)
        steps = torch.arange(3 * n_objects)
        self.register_buffer("kinds", torch.stack([steps % 3, steps % 2]), persistent=False)
        self.register_buffer("objects", torch.stack([steps // 3, steps // 2]), persistent=False)

    def forward(
        self, tokens: torch.Tensor, class_ids: torch.Tensor, points: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        """Run the text decoder with teacher forcing.

        Args:
            tokens: (B, n_tokens, dim) image tokens.
            class_ids: (B, P) int64 token IDs of the class names.
            points: (B, P) bool, True for a point prompt.
            boxes: (B, P, O, 4) target boxes, cx cy w h.

        Returns:
            (B, P, 3 O, dim) hidden states: one per decoding step, three steps per box.
        """
        model, (b, p) = self.model, class_ids.shape
        bos = model.text.embed(torch.full((b, 1), model.config.tokenizer.bos_id, device=tokens.device))
        opening = self.openings[points.long()]  # type: ignore[index]
        ending = self.endings.expand(b, p, -1)  # type: ignore[operator]
        words = model.text.embed(torch.cat([opening, class_ids.unsqueeze(-1), ending], dim=-1))
        kind, which = self.steps(points)
        which = which[..., :-1].clamp(max=self.n_objects - 1)
        chosen = boxes.gather(2, which.unsqueeze(-1).expand(-1, -1, -1, 4))
        coordinate = torch.where(kind[..., :-1] == 0, chosen[..., 0], chosen[..., 1]).unsqueeze(-1)
        sizes = model.region.encode_size(chosen[..., 2:])
        answer = torch.where((kind[..., :-1] == 2).unsqueeze(-1), sizes, model.region.encode_coord(coordinate))
        asked = torch.cat([words, answer.to(words.dtype)], dim=2).flatten(1, 2)
        x = torch.cat([bos, tokens.to(words.dtype), asked], dim=1)
        hidden = model.text(x, self.positions, mask=self.mask)
        stated = hidden[:, model.config.text.prefix_attn :].unflatten(1, (p, self.length))
        return stated[:, :, self.n_head + self.suffix :]  # type: ignore[no-any-return]

    def steps(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each decoding step outputs, and for which object, both (B, P, 3 O) int64.

        The output is 0 (x coordinate or end of the list), 1 (y coordinate) or 2 (width and height).
        """
        flag = points.long()
        return self.kinds[flag], self.objects[flag]  # type: ignore[index]


def read_back(boxes: torch.Tensor, noise: float) -> torch.Tensor:
    """Return boxes (…, 4) cx cy w h with random noise, rounded to the values that the decoder can output.

    Args:
        boxes: boxes as fractions of the image.
        noise: standard deviation of the noise, relative to the box size.
    """
    centre, size = boxes[..., :2], boxes[..., 2:]
    centre = centre + torch.randn_like(centre) * size * noise
    size = size * torch.exp(torch.randn_like(size) * noise)
    centre = (centre * 1024).round().clamp(0, 1023) / 1024
    return torch.cat([centre, size_value(size_bin(size, 1024), 1024)], dim=-1)


def answer_losses(answerer: Answerer, hidden: torch.Tensor, answers: Answers, room: int) -> dict[str, torch.Tensor]:
    """Return the mean losses of the text decoder: `start` for the scores, and `x`, `y`, `w` and `h` for the boxes.

    The result also contains the metric `off`: the fraction of x coordinates that are wrong by more than two bins.

    Args:
        answerer: module that computed `hidden`.
        hidden: (B, P, 3 O, dim) hidden states.
        answers: prompts with their training targets.
        room: maximum number of objects that the box losses use.
    """
    model = answerer.model
    kind, which = answerer.steps(answers.points)
    inside = which < answerer.n_objects
    which = which.clamp(max=answerer.n_objects - 1)
    count = answers.count.unsqueeze(2)
    scored, ends = inside & (which < count), inside & (which == count)
    begin = kind == 0
    weight = begin * torch.where(scored, answers.weight.gather(2, which), ends * 0.25)
    wanted = torch.where(scored, answers.right.gather(2, which), 0.0).clamp(0.005, 0.995)
    ids, head = model.config.tokenizer, model.text.lm_head
    rows = (head.weight[ids.coord_id] - head.weight[ids.eos_id]).unsqueeze(0)
    wish = F.linear(model.text.post_ln(hidden).float(), rows).squeeze(-1)
    wish = wish + head.bias[ids.coord_id] - head.bias[ids.eos_id]
    start = F.binary_cross_entropy_with_logits(wish, wanted, reduction="none")
    losses = {"start": (start * weight).sum() / weight.sum().clamp(min=1)}

    boxes = answers.boxes.gather(2, which.unsqueeze(-1).expand(-1, -1, -1, 4))
    for name, at, column in (("x", 0, 0), ("y", 1, 1), ("size", 2, 2)):
        mask = (scored & (kind == at)).flatten()
        flat = torch.nonzero_static(mask, size=room, fill_value=-1).squeeze(-1)
        used = (flat >= 0).float()
        flat = flat.clamp(min=0)
        states, exact = hidden.flatten(0, 2)[flat], boxes.flatten(0, 2)[flat]
        total = used.sum().clamp(min=1)
        if name == "size":
            scores = model.region.decode_size(states).float()
            for i, side in enumerate("wh"):
                target = (exact[:, 2 + i].clamp(min=2.0**-10).log2() + 10) / 10 * 1023
                losses[side] = (_soft_loss(scores[:, i], target, 1.5) * used).sum() / total
        else:
            scores = model.region.decode_coord(states).float()
            target = exact[:, column] * 1024
            losses[name] = (_soft_loss(scores, target, 1.2) * used).sum() / total
            if name == "x":
                missed = ((scores.detach().argmax(1) - target).abs() > 2).float()
                losses["off"] = (missed * used).sum() / total
    return losses


def _soft_loss(scores: torch.Tensor, target: torch.Tensor, blur: float) -> torch.Tensor:
    """Return the KL divergence (N,) of logits (N, bins) from Gaussian distributions with the means `target` (N,)."""
    bins = torch.arange(scores.shape[1], device=scores.device)
    wanted = torch.softmax(-0.5 * ((bins - target.unsqueeze(1)) / blur) ** 2, dim=1)
    return (wanted * (wanted.clamp(min=1e-9).log() - torch.log_softmax(scores, dim=1))).sum(1)
