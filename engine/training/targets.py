"""From labelled views to what the model is asked and should answer, and the losses of its answers.

A prompt is one class, as `detect` or `point`; its answer is the class's boxes, largest first: an order that the picture
determines, and in which the score of "one more" falls as the answer grows. Knows nothing of optimisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.region import size_bin, size_value
from saccade.engine.training.augment import Batch

# Classes that are easily taken for each other: a good negative prompt comes from the same group.
_GROUPS = (
    ("bicycle", "car", "motorcycle", "bus", "truck", "train", "boat", "airplane"),
    ("cat", "dog", "bird", "horse", "sheep", "cow"),
    ("backpack", "handbag", "suitcase", "umbrella"),
    ("chair", "couch", "dining table", "potted plant", "tv", "laptop", "book", "bottle", "cup", "cell phone"),
    ("person", "face"),
)


@dataclass(slots=True)
class Prompts:
    """P prompts on each of B views, answers of at most O objects.

    Attributes:
        classes: (B, P) int64 class asked for.
        points: (B, P) bool, True for a point prompt.
        boxes: (B, P, O, 4) cx cy w h, largest first.
        valid: (B, P, O) bool.
        stop: (B, P) float, how much the end of the answer teaches: 1, or less where doubtful boxes remain, or 0.
    more: (B, P) float, the wanted chance of one more object at the end: 0, or more where doubtful boxes remain.
    """

    classes: torch.Tensor
    points: torch.Tensor
    boxes: torch.Tensor
    valid: torch.Tensor
    stop: torch.Tensor
    more: torch.Tensor


def similar_classes(classes: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """(classes, classes) bool, True where two classes are easily taken for each other."""
    table = torch.zeros(len(classes), len(classes), dtype=torch.bool)
    for group in _GROUPS:
        members = torch.tensor([classes.index(name) for name in group if name in classes], dtype=torch.int64)
        table[members.unsqueeze(1), members] = True
    return table.to(device)


def choose_prompts(
    batch: Batch, shares: torch.Tensor, similar: torch.Tensor, n_present: int, n_absent: int, n_objects: int
) -> Prompts:
    """Draw prompts: `n_present` of classes in the view where there are as many, the rest of classes that are not.

    A class is asked for in vain about as often as it is there to be found; drawn evenly, 'person' would nearly always
    be a promise, and a fifth of the pictures without people got some.

    Args:
        batch: B views.
        shares: (classes,) part of the pictures that hold each class.
        similar: from `similar_classes`.
        n_present: prompts meant for present classes.
        n_absent: prompts meant for absent ones.
        n_objects: longest answer.
    """
    n_classes = len(shares)
    one_hot = F.one_hot(batch.labels.clamp(min=0), n_classes).bool() & (batch.labels >= 0).unsqueeze(-1)
    present = (one_hot & batch.sure.unsqueeze(-1)).any(1)
    doubtful = (one_hot & ~batch.sure.unsqueeze(-1)).any(1)
    known = ~batch.unknown
    absent = known & ~present & ~doubtful
    gumbel = -torch.log(torch.empty(present.shape, device=present.device).exponential_())
    near = (present.float() @ similar.float()) > 0
    wish_present = torch.where(present & known, 50 + gumbel - 0.3 * shares.log(), torch.where(absent, gumbel, -1e3))
    first = wish_present.topk(n_present, dim=1).indices
    wish_absent = torch.where(
        absent, 50 + gumbel + near + 0.8 * shares.log(), torch.where(present & known, gumbel, -1e3)
    )
    second = wish_absent.scatter(1, first, -1e4).topk(n_absent, dim=1).indices
    classes = torch.cat([first, second], dim=1)

    mine = batch.labels.unsqueeze(1) == classes.unsqueeze(-1)
    area = batch.boxes[..., 2] * batch.boxes[..., 3]
    score = torch.where(mine & batch.sure.unsqueeze(1), area.unsqueeze(1), -1.0)
    top = score.topk(n_objects, dim=2)
    boxes = batch.boxes.unsqueeze(1).expand(-1, classes.shape[1], -1, -1)
    boxes = boxes.gather(2, top.indices.unsqueeze(-1).expand(-1, -1, -1, 4))
    n_all = (score > 0).sum(2)
    unusable = batch.unknown.gather(1, classes)
    # A street scene nearly always holds a doubtful box: a model that never learns to stop there never stops there.
    doubted = (mine & ~batch.sure.unsqueeze(1)).any(2)
    stop = torch.where((n_all > n_objects) | unusable, 0.0, torch.where(doubted, 0.5, 1.0))
    points = torch.rand(classes.shape, device=classes.device) < 0.15
    return Prompts(classes, points, boxes, (top.values > 0) & ~unusable.unsqueeze(-1), stop, doubted * 0.25)


def sequence_mask(prefix: int, prompts: int, length: int, device: torch.device) -> torch.Tensor:
    """(S, S) bool for one sequence [prefix, prompt 1, …]: each prompt sees the prefix and its own past only."""
    total = prefix + prompts * length
    group = torch.full((total,), -1, device=device)
    group[prefix:] = torch.arange(prompts, device=device).repeat_interleave(length)
    at = torch.arange(total, device=device)
    same = (group.unsqueeze(1) == group) & (at.unsqueeze(1) >= at)
    return same | (group == -1)


class Answerer(nn.Module):
    """The model's training forward: views and prompts in, hidden states of the answers and the dense head's map out."""

    def __init__(self, model: Moondream, n_classes: int, n_prompts: int, n_objects: int) -> None:
        super().__init__()
        self.model, self.n_prompts, self.n_objects = model, n_prompts, n_objects
        width = model.config.text.dim
        # For training only: what is centred on each image token, and its box. It teaches the tower all classes at once.
        self.dense = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, n_classes + 4))
        nn.init.constant_(self.dense[3].bias[:n_classes], -4.6)  # type: ignore[index]
        templates = model.config.tokenizer.templates
        heads = [templates["detect"]["prefix"], templates["point"]["prefix"]]
        self.n_head = len(heads[0])
        self.suffix = len(templates["detect"]["suffix"])
        self.register_buffer("openings", torch.tensor(heads), persistent=False)
        self.register_buffer("endings", torch.tensor(templates["detect"]["suffix"]), persistent=False)
        self.length = self.n_head + 1 + self.suffix + 3 * n_objects - 1
        prefix = model.config.text.prefix_attn
        mask = sequence_mask(prefix, n_prompts, self.length, torch.device("cpu"))
        self.register_buffer("mask", mask, persistent=False)
        at = torch.cat([torch.arange(prefix), prefix + torch.arange(self.length).repeat(n_prompts)])
        self.register_buffer("positions", at.unsqueeze(0), persistent=False)
        steps = torch.arange(3 * n_objects)
        self.register_buffer("detect_kind", steps % 3, persistent=False)
        self.register_buffer("detect_object", steps // 3, persistent=False)
        self.register_buffer("point_kind", steps % 2, persistent=False)
        self.register_buffer("point_object", (steps // 2).clamp(max=n_objects - 1), persistent=False)

    def forward(
        self, images: torch.Tensor, class_ids: torch.Tensor, points: torch.Tensor, boxes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model with the answers given.

        Args:
            images: (B, 3, size, size).
            class_ids: (B, P) int64 token ids of the class names.
            points: (B, P) bool.
            boxes: (B, P, O, 4) answers as the model would have read them back.

        Returns:
            hidden (B, P, 3 O, dim): what the model knows when it must choose each next thing; and the dense map
            (B, tokens, classes + 4).
        """
        model = self.model
        features = model.vision.features(images)
        tokens = model.vision.project(features, features)
        b, p = class_ids.shape
        bos = model.text.embed(torch.full((b, 1), model.config.tokenizer.bos_id, device=images.device))
        opening = self.openings[points.long()]  # type: ignore[index]
        ending = self.endings.expand(b, p, -1)  # type: ignore[operator]
        words = model.text.embed(torch.cat([opening, class_ids.unsqueeze(-1), ending], dim=-1))
        kind, which = self.steps(points)
        chosen = boxes.gather(2, which[..., :-1].unsqueeze(-1).expand(-1, -1, -1, 4))
        coordinate = torch.where(kind[..., :-1] == 0, chosen[..., 0], chosen[..., 1]).unsqueeze(-1)
        sizes = model.region.encode_size(chosen[..., 2:])
        answer = torch.where((kind[..., :-1] == 2).unsqueeze(-1), sizes, model.region.encode_coord(coordinate))
        asked = torch.cat([words, answer.to(words.dtype)], dim=2).flatten(1, 2)
        x = torch.cat([bos, tokens.to(words.dtype), asked], dim=1)
        hidden = model.text(x, self.positions, mask=self.mask)
        answers = hidden[:, model.config.text.prefix_attn :].unflatten(1, (p, self.length))
        return answers[:, :, self.n_head + self.suffix :], self.dense(tokens)

    def steps(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Kind (0 begin and x, 1 y, 2 size) and object of each step, both (B, P, 3 O)."""
        flag = points.unsqueeze(-1)
        return (
            torch.where(flag, self.point_kind, self.detect_kind),  # type: ignore[arg-type]
            torch.where(flag, self.point_object, self.detect_object),  # type: ignore[arg-type]
        )


def read_back(boxes: torch.Tensor, noise: float) -> torch.Tensor:
    """Answers (…, 4) as the model reads them back: in bins, and off by `noise` of their size, as its own would be."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    centre = centre + torch.randn_like(centre) * size * noise
    size = size * torch.exp(torch.randn_like(size) * noise)
    centre = (centre * 1024).round().clamp(0, 1023) / 1024
    return torch.cat([centre, size_value(size_bin(size, 1024), 1024)], dim=-1)


def answer_losses(answerer: Answerer, hidden: torch.Tensor, prompts: Prompts, room: int) -> dict[str, torch.Tensor]:
    """Mean loss of each kind of choice: start (or stop), x, y, w, h.

    Args:
        answerer: what produced `hidden`.
        hidden: (B, P, 3 O, dim).
        prompts: what was asked, with exact answers.
        room: most choices of one kind that are scored; keeps shapes fixed.
    """
    model = answerer.model
    kind, which = answerer.steps(prompts.points)
    valid = prompts.valid.gather(2, which)
    boxes = prompts.boxes.gather(2, which.unsqueeze(-1).expand(-1, -1, -1, 4))
    count = prompts.valid.sum(2, keepdim=True)
    # Steps beyond the last object of a clamped point answer repeat it: none of them is a choice.
    in_order = torch.where(prompts.points.unsqueeze(-1), torch.arange(kind.shape[2], device=kind.device) // 2, which)
    begin = kind == 0
    weight = begin * ((in_order < count) + (in_order == count) * prompts.stop.unsqueeze(-1))
    wanted = torch.where(in_order < count, 0.98, prompts.more.unsqueeze(-1).clamp(min=0.02))
    ids = model.config.tokenizer
    head = model.text.lm_head
    rows = torch.stack([head.weight[ids.coord_id] - head.weight[ids.eos_id]])
    wish = (
        F.linear(model.text.post_ln(hidden).float(), rows).squeeze(-1) + head.bias[ids.coord_id] - head.bias[ids.eos_id]
    )
    start = F.binary_cross_entropy_with_logits(wish, wanted, reduction="none")
    losses = {"start": (start * weight).sum() / weight.sum().clamp(min=1)}

    scored = valid & (in_order < count)
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
                losses[side] = (_soft_loss(scores[:, i], target, torch.full_like(target, 6.0)) * used).sum() / total
        else:
            scores = model.region.decode_coord(states).float()
            blur = (exact[:, 2 + column] * 1024 * 0.04).clamp(1.5, 12.0)
            losses[name] = (_soft_loss(scores, exact[:, column] * 1024, blur) * used).sum() / total
    return losses


def _soft_loss(scores: torch.Tensor, target: torch.Tensor, blur: torch.Tensor) -> torch.Tensor:
    """Divergence from a Gaussian over the bins around `target`, (N, bins) and (N,) to (N,); 0 is perfect."""
    bins = torch.arange(scores.shape[1], device=scores.device)
    wanted = torch.softmax(-0.5 * ((bins - target.unsqueeze(1)) / blur.unsqueeze(1)) ** 2, dim=1)
    return (wanted * (wanted.clamp(min=1e-9).log() - torch.log_softmax(scores, dim=1))).sum(1)


def dense_losses(dense: torch.Tensor, batch: Batch, n_classes: int) -> dict[str, torch.Tensor]:
    """Losses of the dense head: heat of each class (penalty-reduced focal, Zhou et al. 2019, arXiv:1904.07850), box."""
    b, tokens, _ = dense.shape
    grid = int(tokens**0.5)
    scores, offsets = dense.float().split([n_classes, 4], dim=-1)
    ticks = (torch.arange(grid, device=dense.device) + 0.5) / grid
    centre, size = batch.boxes[..., :2], batch.boxes[..., 2:]
    spread = (size / 8).clamp(min=0.35 / grid)
    dx = ((ticks - centre[..., :1]) / spread[..., :1]) ** 2
    dy = ((ticks - centre[..., 1:]) / spread[..., 1:]) ** 2
    bump = torch.exp(-0.5 * (dy.unsqueeze(-1) + dx.unsqueeze(-2))).flatten(2)  # (B, M, tokens)
    cell = (centre * grid).long().clamp(0, grid - 1)
    token = cell[..., 1] * grid + cell[..., 0]
    good = batch.sure & (batch.labels >= 0)
    bump = bump.scatter(2, token.unsqueeze(-1), 1.0) * good.unsqueeze(-1)
    labels = batch.labels.clamp(min=0)
    heat = torch.zeros(b, n_classes, tokens, device=dense.device)
    heat = heat.scatter_reduce(1, labels.unsqueeze(-1).expand_as(bump), bump, "amax").transpose(1, 2)

    inside_x = ((ticks - centre[..., :1]).abs() < size[..., :1] / 2 + 0.5 / grid).unsqueeze(-2)
    inside_y = ((ticks - centre[..., 1:]).abs() < size[..., 1:] / 2 + 0.5 / grid).unsqueeze(-1)
    doubt = ((inside_x & inside_y).flatten(2) & (~batch.sure & (batch.labels >= 0)).unsqueeze(-1)).float()
    ignore = torch.zeros(b, n_classes, tokens, device=dense.device)
    ignore = ignore.scatter_reduce(1, labels.unsqueeze(-1).expand_as(doubt), doubt, "amax").transpose(1, 2)
    learn = ((1 - ignore) * (~batch.unknown).unsqueeze(1)).clamp(max=1.0)
    peak = heat > 0.999
    learn = torch.where(peak, 1.0, learn)
    p = torch.sigmoid(scores).clamp(1e-5, 1 - 1e-5)
    focal = torch.where(peak, -((1 - p) ** 2) * p.log(), -((1 - heat) ** 4) * p**2 * (1 - p).log())
    heat_loss = (focal * learn).sum() / peak.sum().clamp(min=1)

    read = offsets.gather(1, token.unsqueeze(-1).expand(-1, -1, 4))
    middle = (cell + 0.5) / grid
    wanted = torch.cat([(centre - middle) * grid, size.clamp(min=1e-3).log2()], dim=-1)
    box_loss = ((read - wanted).abs().mean(-1) * good).sum() / good.sum().clamp(min=1)
    return {"heat": heat_loss, "box": box_loss}
