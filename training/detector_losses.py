"""Losses of the detector: supervised losses, and distillation from a detector that was trained on COCO.

Training starts with the weights of the COCO detector. Distillation keeps the trained detector from forgetting the
classes of COCO.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from saccade.engine.models.nano.detector_tower import boxes_at, places
from saccade.engine.models.nano.picodet import BINS, Evidence
from training.augment import Batch

_POSITIVES = 9  # places that a labelled box is learned at
_ABSENT = 0.3  # what is left of the start's evidence for a class that the pack says is not there
_PART = 2.0  # weight of the class that the start lacks
_LEAST = 0.3  # weight of a positive whose box is still wrong: a class that the start lacks begins with such


@dataclass(slots=True)
class Assigned:
    """Assignment of labelled boxes to the P grid cells of the detector, in N images.

    Attributes:
        positive: (N, P) bool, True if a labelled box is assigned to the grid cell.
        box: (N, P) int64 index of the labelled box.
        quality: (N, P) float32 target of the class score: the higher, the better the cell predicts the box. 0 if
            `positive` is False.
    """

    positive: torch.Tensor
    box: torch.Tensor
    quality: torch.Tensor


def detector_losses(
    seen: Evidence, start: Evidence, batch: Batch, part_class: int, known: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the losses of the detector by name.

    - `classes`: focal loss of the class scores.
    - `boxes`: generalized IoU loss of the boxes.
    - `bins`: distribution focal loss of the distances from a grid cell to the box sides.
    - `keep`: distillation loss: KL divergence from the distances that the COCO detector predicts.

    Args:
        seen: output of the trained detector for N augmented images.
        start: output of the COCO detector for the same images.
        batch: the augmented images with their labels.
        part_class: ID of the class with separate box outputs, such as face.
        known: (classes,) bool, True for classes of COCO.
    """
    height, width = batch.images.shape[2:]
    centres, strides = places(height, width, batch.images.device)
    scale = torch.tensor([width, height, width, height], device=centres.device)
    centre, size = batch.boxes[..., :2], batch.boxes[..., 2:]
    truth = torch.cat([centre - size / 2, centre + size / 2], dim=-1) * scale
    logits, sides = seen.classes.float(), seen.sides.float()
    scores = logits.detach().sigmoid()
    n_classes = logits.shape[-1]
    usable = batch.sure & (batch.labels >= 0)
    part = batch.labels == part_class

    target = torch.zeros_like(logits)
    box_loss = bins_loss = logits.new_zeros(())
    total = logits.new_zeros(())
    taken = None
    for own in (False, True):
        group = sides[..., own * 4 * BINS :][..., : 4 * BINS]
        boxes = boxes_at(centres, strides, group)
        chosen = assign(boxes.detach(), scores, truth, batch.labels, usable & (part == own), centres, strides)
        label = batch.labels.clamp(min=0).gather(1, chosen.box)
        target.scatter_reduce_(2, label.unsqueeze(-1), chosen.quality.unsqueeze(-1), "amax")
        weight = torch.where(chosen.positive, chosen.quality.clamp(min=_LEAST), 0.0) * (_PART if own else 1.0)
        wanted = truth.gather(1, chosen.box.unsqueeze(-1).expand(-1, -1, 4))
        box_loss = box_loss + ((1 - generalised_iou(boxes, wanted)) * weight).sum()
        reach = torch.cat([centres - wanted[..., :2], wanted[..., 2:] - centres], dim=-1) / strides.unsqueeze(-1)
        bins_loss = bins_loss + (_bins_loss(group, reach) * weight).sum()
        total = total + weight.sum()
        taken = chosen.positive if taken is None else taken

    one_hot = F.one_hot(batch.labels.clamp(min=0), n_classes).bool() & (batch.labels >= 0).unsqueeze(-1)
    absent = ~(one_hot.any(1) | batch.unknown)
    taught = start.classes.float().sigmoid() * known
    target = torch.maximum(target, taught * torch.where(absent, _ABSENT, 1.0).unsqueeze(1))
    # Nothing is stated of a class that the start lacks where it may be or not.
    inside = ((centres.view(1, 1, -1, 2) > truth[..., None, :2]) & (centres < truth[..., None, 2:])).all(-1)
    doubt = (inside & (~batch.sure & (batch.labels >= 0)).unsqueeze(-1)).float()
    ignored = torch.zeros_like(logits).transpose(1, 2)
    ignored = ignored.scatter_reduce(1, batch.labels.clamp(min=0).unsqueeze(-1).expand_as(doubt), doubt, "amax")
    learn = ((ignored.transpose(1, 2) < 0.5) & ~batch.unknown.unsqueeze(1)) | known | (target > 0.3)
    focus = (target - logits.sigmoid()).abs().square()
    weigh = torch.where(known, 1.0, _PART)
    classes = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * focus * learn * weigh
    norm = total.clamp(min=1)

    assert taken is not None
    surest = taught.amax(-1)
    follow = torch.where(taken | (surest < 0.15), 0.0, surest)
    ours = sides[..., : 4 * BINS].unflatten(-1, (4, BINS)).log_softmax(-1)
    theirs = start.sides[..., : 4 * BINS].float().unflatten(-1, (4, BINS)).softmax(-1)
    apart = F.kl_div(ours, theirs, reduction="none").sum((-1, -2))
    return {
        "classes": classes.sum() / norm,
        "boxes": box_loss / norm,
        "bins": bins_loss / norm,
        "keep": (apart * follow).sum() / follow.sum().clamp(min=1),
    }


@torch.no_grad()
def assign(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    truth: torch.Tensor,
    labels: torch.Tensor,
    usable: torch.Tensor,
    centres: torch.Tensor,
    strides: torch.Tensor,
) -> Assigned:
    """Assign each labelled box to the grid cells that predict its class and box best (TOOD, arXiv:2108.07755).

    A prior prefers grid cells near the box centre whose stride fits the box size.

    Args:
        boxes: (N, P, 4) predicted boxes in pixels.
        scores: (N, P, classes) predicted scores.
        truth: (N, M, 4) labelled boxes in pixels.
        labels: (N, M) int64 class IDs of the labelled boxes.
        usable: (N, M) bool, False for labelled boxes to ignore.
        centres: (P, 2) centres of the grid cells in pixels.
        strides: (P,) strides of the grid cells in pixels.
    """
    overlap = iou(truth.unsqueeze(2), boxes.unsqueeze(1))  # (N, M, P)
    middle, size = (truth[..., :2] + truth[..., 2:]) / 2, (truth[..., 2:] - truth[..., :2]).clamp(min=1)
    away = ((middle.unsqueeze(2) - centres) / strides.unsqueeze(-1)).square().sum(-1)
    fit = (size.amax(-1).unsqueeze(-1) / (5 * strides)).log2().square()
    prior = torch.exp(-away / 4 - fit)
    stated = scores.gather(2, labels.clamp(min=0).unsqueeze(1).expand(-1, scores.shape[1], -1)).transpose(1, 2)
    metric = (stated + 0.01).sqrt() * (0.15 * prior + overlap).pow(4)
    half = torch.maximum(size.unsqueeze(2) / 2, strides.view(1, 1, -1, 1) * 0.75)
    inside = ((middle.unsqueeze(2) - centres).abs() <= half).all(-1)
    metric = metric * (inside & usable.unsqueeze(-1))
    best = metric.topk(_POSITIVES, dim=2)
    mine = torch.zeros_like(metric).scatter(2, best.indices, best.values)
    value, box = mine.max(1)
    positive = value > 0
    # The best place says the IoU it has; the others less, as they say the box less well.
    peak = mine.amax(2).clamp(min=1e-12)
    height = (overlap * (mine > 0)).amax(2)
    quality = value / peak.gather(1, box) * height.gather(1, box)
    return Assigned(positive, box, torch.where(positive, quality.clamp(0, 1), 0.0))


def iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union (IoU) of boxes (..., 4) x1 y1 x2 y2. Shapes are broadcast."""
    shared = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    areas = (a[..., 2:] - a[..., :2]).clamp(min=0).prod(-1) + (b[..., 2:] - b[..., :2]).clamp(min=0).prod(-1)
    return shared / (areas - shared).clamp(min=1e-9)


def generalised_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the generalized IoU of boxes (Rezatofighi et al. 2019, arXiv:1902.09630)."""
    shared = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    areas = (a[..., 2:] - a[..., :2]).clamp(min=0).prod(-1) + (b[..., 2:] - b[..., :2]).clamp(min=0).prod(-1)
    union = (areas - shared).clamp(min=1e-6)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1).clamp(min=1e-6)
    return shared / union - (hull - union) / hull


def _bins_loss(group: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """Return the distribution focal loss of the distances to the box sides (Li et al. 2020, arXiv:2006.04388)."""
    logs = group.unflatten(-1, (4, BINS)).log_softmax(-1)
    reach = reach.clamp(0, BINS - 1 - 1e-3)
    low = reach.long()
    part = reach - low
    lower, upper = logs.gather(-1, low.unsqueeze(-1)), logs.gather(-1, low.unsqueeze(-1) + 1)
    apart: torch.Tensor = lower.squeeze(-1) * (1 - part) + upper.squeeze(-1) * part
    return -apart.mean(-1)
