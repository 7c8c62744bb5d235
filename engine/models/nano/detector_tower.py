"""Vision encoder that is an object detector. Its image tokens are the best detections and a coarse grid of the image.

PicoDet detects objects in each crop, and non-maximum suppression removes duplicates. Each of the best detections
becomes one image token. Then each cell of the coarse grid becomes one image token.

All shapes are fixed on CUDA, so that CUDA graphs can capture the encoder.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.config import VisionConfig
from saccade.engine.models.moondream.region import size_bin, size_value
from saccade.engine.models.moondream.vision import CropReader
from saccade.engine.models.nano.picodet import BINS, STRIDES, Evidence, PicoDet
from saccade.engine.models.protocol import ImageCrops, Look, Tiling

# Octaves of the Fourier features of boxes; the last one has a period of 1/512, which resolves bins of 1/1024.
OCTAVES = 10
_PLACES, _PAIRS = 256, 192  # maximum numbers of places and of (place, class) pairs before non-maximum suppression
_SAME = 0.6  # IoU above which two boxes of a class are one object
_ROUNDS = 4  # rounds of suppression; exact for chains of this length (Zheng et al. 2020, arXiv:2005.03572)
_FLOOR = -4.2  # minimum logit of a pair (score of 1.5 %)
_LOOK_SIDE = 96  # side in pixels of the crop of an object whose appearance is described
_BINS = 1024  # bins per coordinate and size, as in the published region heads
_TRAITS = 12  # features of a detection relative to the others, see `traits_of`
# Minimum width / height of an image for fewer rows; minimum height / width of a crop.
_LANDSCAPE, _FLATTEST = 1.45, 0.65


@dataclass(slots=True)
class CropDetections:
    """The best K detections in each of N crops, best first.

    Attributes:
        boxes: (N, K, 4) float32 x1 y1 x2 y2 as fractions of the crop, clipped to the crop.
        labels: (N, K) int64 class indices.
        logits: (N, K) logits of the scores.
        alive: (N, K) bool, True for detections and False for padding.
        places: (N, K) int64 indices of the detector's grid cells.
        traits: (N, K, traits) input features of the network `Rescorer`.
    """

    boxes: torch.Tensor
    labels: torch.Tensor
    logits: torch.Tensor
    alive: torch.Tensor
    places: torch.Tensor
    traits: torch.Tensor


class Rescorer(nn.Module):
    """Small network that rescores each detection by comparing it with detections of higher score.

    The detector scores each grid cell independently. A duplicate of a detection may therefore have a high score.
    """

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.n_classes = n_classes
        # Rescoring raises AP50 from .712 to .723 for persons and from .609 to .632 for faces, on validation images
        # that were not used for training.
        self.fc1 = nn.Linear(_TRAITS + n_classes, 48)
        self.fc2 = nn.Linear(48, 1)

    def forward(self, traits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the new logits (...) of detections.

        Args:
            traits: (..., _TRAITS) features of the detections. The first feature is the detector's logit, divided by 4.
            labels: (...) int64 class indices.
        """
        kinds = F.one_hot(labels, self.n_classes).to(traits.dtype)
        inner = F.gelu(self.fc1(torch.cat([traits, kinds], dim=-1)), approximate="tanh")
        return traits[..., 0] * 4 + self.fc2(inner).squeeze(-1)  # type: ignore[no-any-return]


class DetectorTower(CropReader):
    """Vision encoder that returns detections as image tokens. It uses one crop per image.

    Attributes:
        quick_crops: whether to resize with `resize`, which is faster than Pillow, and to use crops with fewer rows for
            wide images. The crops are then not byte-identical with Pillow's. On the validation set, the mAP50 is
            .572 with `quick_crops` and .562 without.
        asked: detector class index, keyed by the token IDs of the prompt that asks for the class.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.quick_crops = False
        self._apart = config.n_boxes == 2  # body parts have separate boxes
        self.asked: Mapping[tuple[int, ...], int] = {}
        width = config.proj_out_dim
        self.stem = PicoDet(config.n_classes, config.n_boxes)
        neck = self.stem.reduce[0].out_channels
        assert isinstance(neck, int)
        self.judge = Rescorer(config.n_classes)
        self.feature = nn.Linear(neck, width)
        self.evidence = nn.Linear(config.n_classes + 2, width)
        # Not nn.Embedding(…): on the meta device, its random initialization imports torch._dynamo, which takes 1.9 s.
        self.label = nn.Embedding.from_pretrained(torch.zeros(config.n_classes, width), freeze=False)
        self.box = nn.Linear(2 * OCTAVES * 4, width)
        self.before = nn.Linear(2 * OCTAVES * 4, width, bias=False)
        self.begins = nn.Parameter(
            torch.zeros(width)
        )  # used by the first detection of a class, which has no previous box
        self.nothing = nn.Parameter(torch.zeros(width))  # content of padding tokens
        self.coarse = nn.Linear(neck, width)
        self.blocks = nn.ModuleList()
        self.pos_emb = nn.Parameter(torch.zeros(1, config.n_tokens, width))

    def set_crop_size(self, size: int) -> None:
        """Set the width of all later crops in pixels. The number of image tokens does not change.

        Raises:
            ValueError: if `size` is not a multiple of 32 from 128 to 1280.
        """
        if not 128 <= size <= 1280 or size % 32:
            raise ValueError(f"imgsz must be a multiple of 32 from 128 to 1280; got {size}")
        self.config = replace(self.config, crop_size=size)

    def make_crops(self, image: NDArray[np.uint8]) -> ImageCrops:
        """Resize the whole image (height, width, 3) uint8 RGB to one crop."""
        if not self.quick_crops:
            return super().make_crops(image)
        size, (height, width, _) = self.config.crop_size, image.shape
        return ImageCrops(resize(image, landscape_rows(height, width, size), size)[None], (1, 1))

    def normalize(self, crops: torch.Tensor) -> torch.Tensor:
        """Convert crops (n, rows, columns, 3) uint8 to (n, 3, rows, columns) from -1 to 1, in the encoder's dtype.

        Twice as fast as `CropReader.normalize`; the last bit may differ.
        """
        return crops.permute(0, 3, 1, 2).to(self.pos_emb.dtype).mul_(2 / 255).sub_(1)

    def make_look(self) -> Look:
        """Return a function that computes an appearance descriptor of the object in a crop.

        The function averages the feature maps of the detector's neck over the crop. It uses its own copy of backbone
        and neck on the CPU, so that it can run in parallel with the engine.
        """
        stem = copy.deepcopy(self.stem).to("cpu", torch.float32).eval()
        del stem.heads

        def look(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
            small = np.array(Image.fromarray(pixels).resize((_LOOK_SIDE, _LOOK_SIDE), Image.Resampling.BILINEAR))
            with torch.inference_mode():
                crop = torch.from_numpy(small).permute(2, 0, 1).unsqueeze(0).float() * (2 / 255) - 1
                pooled = [F.normalize(x.mean((2, 3)), dim=1) for x in stem.maps(crop)]
                return torch.cat(pooled, dim=1)[0].div(len(pooled) ** 0.5).numpy()

        return look

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        """Return image tokens (N, n_tokens, proj_out_dim) of normalized crops (N, 3, height, width)."""
        return self.features_and_drafts(crops)[0]

    def features_and_drafts(self, crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the image tokens, and the detections (N, n_drafts, 5) float32 that serve as drafts, best first.

        A detection consists of class (-1 for none), centre x and y, width and height. Coordinates and sizes are rounded
        to the bins of the region heads. The decoder is trained to copy these values: on the validation set, 95 % of its
        values are equal to the drafts.
        """
        evidence = self.stem(crops)
        finds = self.find(evidence, crops.shape[2], crops.shape[3])
        low, high = finds.boxes.split(2, dim=-1)
        centres = ((low + high) / 2 * _BINS).round().clamp(max=_BINS - 1) / _BINS
        sizes = size_value(size_bin(high - low, _BINS), _BINS)
        labels = torch.where(finds.alive, finds.labels, -1).unsqueeze(-1)
        return self.tokens(evidence, finds), torch.cat([labels.float(), centres, sizes], dim=-1)

    @property
    def n_drafts(self) -> int:
        """Number of detections that the encoder returns per crop."""
        return self.config.n_places

    def project(self, whole: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Return `whole` unchanged: the features of this encoder are already image tokens."""
        return whole

    def forward(self, crops: torch.Tensor, _: Tiling) -> torch.Tensor:
        """Return image tokens (n_tokens, proj_out_dim) of one image from its global crop (1, 3, height, width)."""
        return self.features(crops[:1])[0]

    def join(self, features: torch.Tensor, _: Tiling) -> torch.Tensor:
        """Return the image tokens of the global crop, which is the only crop."""
        return features[0]

    def find(self, evidence: Evidence, height: int, width: int) -> CropDetections:
        """Return the best detections in crops of `height` × `width` pixels, from the outputs of the detector."""
        config, classes = self.config, evidence.classes
        top = classes.max(-1).values.topk(min(_PLACES, classes.shape[1]), dim=1).indices
        there = classes.gather(1, top.unsqueeze(-1).expand(-1, -1, config.n_classes))
        logits, pairs = there.flatten(1).float().topk(_PAIRS, dim=1)
        # Drop pairs without object, which saves 1 of 3 ms on a CPU; a CUDA graph needs fixed shapes.
        if not logits.is_cuda:
            some = max(config.n_places, int((logits > _FLOOR).sum(1).max()))
            logits, pairs = logits[:, :some], pairs[:, :some]
        labels, at = pairs % config.n_classes, top.gather(1, pairs // config.n_classes)

        per_box = 4 * BINS
        sides = evidence.sides.gather(1, at.unsqueeze(-1).expand(-1, -1, evidence.sides.shape[-1]))
        if self._apart:
            own = (labels == config.part_class).unsqueeze(-1)
            sides = torch.where(own, sides[..., per_box:], sides[..., :per_box])
        centres, strides = places(height, width, classes.device)
        boxes = boxes_at(centres[at], strides[at], sides) / _scale(height, width, classes.device)
        boxes = boxes.clamp(0, 1)

        relations = Relations.of(boxes)
        alive = ~suppressed(relations, labels) & (logits > _FLOOR)
        traits = traits_of(relations, boxes, labels, logits, alive)
        logits = self.judge(traits.to(self.feature.weight.dtype), labels).float()
        order = torch.where(alive, logits, logits - 100).topk(config.n_places, dim=1).indices
        return CropDetections(
            _pick(boxes, order),
            labels.gather(1, order),
            logits.gather(1, order),
            alive.gather(1, order),
            at.gather(1, order),
            _pick(traits, order),
        )

    def tokens(self, evidence: Evidence, finds: CropDetections) -> torch.Tensor:
        """Return image tokens (N, n_tokens, proj_out_dim): one per detection, then one per cell of the coarse grid."""
        at, kind = finds.places.unsqueeze(-1), self.feature.weight.dtype
        features = evidence.features.gather(1, at.expand(-1, -1, evidence.features.shape[-1])).to(kind)
        classes = evidence.classes.gather(1, at.expand(-1, -1, self.config.n_classes)).float()
        logits = finds.logits.unsqueeze(-1)
        sure = torch.cat([classes.sigmoid(), logits.sigmoid(), logits / 4], dim=-1)
        low, high = finds.boxes.split(2, dim=-1)
        centre, size = (low + high) / 2, high - low
        scaled = (size.clamp(min=2.0**-10).log2() + 10) / 10
        box = self.box(octaves(torch.cat([centre, scaled], dim=-1)).to(kind))
        last = predecessors(finds)
        known = torch.cat([centre, size], dim=-1).gather(1, last.clamp(min=0).unsqueeze(-1).expand(-1, -1, 4))
        before = torch.where((last >= 0).unsqueeze(-1), self.before(octaves(known).to(kind)), self.begins)
        found = self.feature(features) + self.evidence(sure.to(kind)) + self.label(finds.labels) + box + before
        found = torch.where(finds.alive.unsqueeze(-1), found, self.nothing)
        side = self.config.coarse
        grid = F.adaptive_avg_pool2d(evidence.grid.to(kind), (side, side)).permute(0, 2, 3, 1).flatten(1, 2)
        return torch.cat([found, self.coarse(grid)], dim=1) + self.pos_emb


def landscape_rows(height: int, width: int, size: int) -> int:
    """Return the number of rows of a crop with `size` columns. Crops of wide images have fewer rows.

    For images wider than 1.45 times their height, the number of rows follows the aspect ratio, rounded up to a multiple
    of 32. It is at least 65 % of `size`; with fewer rows, the detector misses more people far from the camera. A crop
    with 416 columns has 288 rows for aspect ratios of 3:2 and 16:9.
    """
    if width < _LANDSCAPE * height:
        return size
    return min(size, 32 * math.ceil(size * max(height / width, _FLATTEST) / 32))


def resize(image: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.uint8]:
    """Resize an image (height, width, 3) uint8 RGB to (rows, columns, 3) with a Lanczos filter."""
    # Torch 2.12 or later resizes 1920×1080 in 2.8 ms, Pillow in 21 ms. Their values differ by at most 2 of 255.
    if not _torch_knows_lanczos():
        return np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.LANCZOS))
    # Torch does not accept other arrays.
    writable = image if image.flags.writeable and min(image.strides) > 0 else image.copy()
    pixels = torch.from_numpy(writable).permute(2, 0, 1).unsqueeze(0)
    out: NDArray[np.uint8] = _lanczos(pixels, rows, columns).permute(0, 2, 3, 1)[0].numpy()
    return out


def _lanczos(pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.interpolate(pixels, (rows, columns), mode="lanczos", antialias=True)


@functools.cache
def _torch_knows_lanczos() -> bool:
    try:
        _lanczos(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), 4, 4)
    except (NotImplementedError, ValueError, RuntimeError):
        return False
    return True


@functools.lru_cache(maxsize=16)
def places(height: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the centres (P, 2) in pixels and the strides (P,) of all grid cells in a crop.

    Both tensors are float32, read-only and cached.
    """
    centres, strides = [], []
    with torch.inference_mode(False):
        for stride in STRIDES:
            rows, columns = -(-height // stride), -(-width // stride)
            y, x = torch.meshgrid(
                (torch.arange(rows, device=device) + 0.5) * stride,
                (torch.arange(columns, device=device) + 0.5) * stride,
                indexing="ij",
            )
            centres.append(torch.stack([x, y], dim=-1).view(-1, 2))
            strides.append(torch.full((rows * columns,), float(stride), device=device))
        return torch.cat(centres), torch.cat(strides)


def distances(sides: torch.Tensor) -> torch.Tensor:
    """Return the expected distances (..., 4) from a grid cell's centre to the left, top, right and bottom of a box.

    The unit is the stride of the grid cell. `sides` are the logits (..., 4 · BINS) of the distance distributions.
    """
    bins = torch.arange(BINS, dtype=sides.dtype, device=sides.device)
    return torch.matmul(sides.unflatten(-1, (4, BINS)).softmax(-1), bins)


def boxes_at(centres: torch.Tensor, strides: torch.Tensor, sides: torch.Tensor) -> torch.Tensor:
    """Return boxes (..., 4) x1 y1 x2 y2 in pixels.

    Args:
        centres: (..., 2) centres of the grid cells, in pixels.
        strides: (...) strides of the grid cells, in pixels.
        sides: (..., 4 · BINS) logits of the distances to the four sides.
    """
    reach = distances(sides.float()) * strides.unsqueeze(-1)
    return torch.cat([centres - reach[..., :2], centres + reach[..., 2:]], dim=-1)


def octaves(values: torch.Tensor) -> torch.Tensor:
    """Return Fourier features (..., n · 2 · OCTAVES) of values (..., n) from 0 to 1: all cosines, then all sines."""
    turns = values.float().unsqueeze(-1) * (2.0 ** torch.arange(OCTAVES, device=values.device)) * math.pi
    return torch.cat([turns.cos(), turns.sin()], dim=-1).flatten(-2)


def predecessors(finds: CropDetections) -> torch.Tensor:
    """For each detection, return the index of the detection of the same class with the next higher score.

    The result is (N, K) int64, for K detections in each of N crops. It is -1 for the best detection of a class.
    """
    count = finds.labels.shape[1]
    same = (finds.labels.unsqueeze(2) == finds.labels.unsqueeze(1)) & finds.alive.unsqueeze(1)
    return (same.tril(-1) * torch.arange(1, count + 1, device=same.device)).amax(2) - 1


@dataclass(slots=True)
class Relations:
    """Overlap of each box i with each box j of the same crop.

    Attributes:
        iou: (N, M, M) intersection over union.
        covered: (N, M, M) fraction of box i that is inside box j.
    """

    iou: torch.Tensor
    covered: torch.Tensor

    @classmethod
    def of(cls, boxes: torch.Tensor) -> Relations:
        """Compute the overlaps of all pairs of boxes in each crop. The boxes are (N, M, 4) x1 y1 x2 y2."""
        # One coordinate at a time, because an innermost dimension of 2 is not vectorized.
        left, top, right, bottom = boxes.transpose(1, 2).contiguous().unbind(1)
        area = (right - left).clamp(min=1e-4) * (bottom - top).clamp(min=1e-4)
        width = _each(torch.minimum, right).sub_(_each(torch.maximum, left)).clamp_(min=0)
        height = _each(torch.minimum, bottom).sub_(_each(torch.maximum, top)).clamp_(min=0)
        shared = width.mul_(height)
        return cls(shared / _each(torch.add, area).sub_(shared), shared / area.unsqueeze(2))


def suppressed(relations: Relations, labels: torch.Tensor) -> torch.Tensor:
    """Return a mask (N, M) of the boxes that overlap a better box of the same class (non-maximum suppression).

    A suppressed box does not suppress other boxes. The boxes must be sorted by score, highest first.
    """
    # [j, i]: i has a higher score than j.
    covers = ((relations.iou > _SAME) & _each(torch.eq, labels.float())).tril(-1).float()
    kept = torch.ones_like(labels, dtype=torch.float32)
    for _ in range(_ROUNDS):
        kept = (torch.matmul(covers, kept.unsqueeze(2)).squeeze(2) == 0).float()
    return kept == 0


def traits_of(
    relations: Relations, boxes: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor, alive: torch.Tensor
) -> torch.Tensor:
    """Return features (N, M, _TRAITS) that compare each of M detections with the detections of higher score.

    The features include scores, box sizes, and the overlaps with detections of the same class and of other classes.
    """
    # Floats instead of booleans, because multiplying by a boolean mask takes four times as long.
    before = alive.float().unsqueeze(1).expand_as(relations.iou).tril(-1)  # [j, i]: i has a higher score than j
    same = _each(torch.eq, labels.float()).float() * before
    own, others = relations.iou * same, relations.iou * (before - same)
    most, which = own.max(2)
    most_other, other = others.max(2)
    size = (boxes[..., 2:] - boxes[..., :2]).clamp(min=1e-3).log2() / 4 + 1
    return torch.stack(
        [
            logits / 4,
            logits.sigmoid(),
            2 * most,
            torch.where(most > 0, logits.gather(1, which) - logits, 0.0) / 2,
            (relations.covered * same).amax(2),
            (relations.covered.transpose(1, 2) * same).amax(2),
            (own > 0.3).sum(2) / 2,
            same.sum(2) / 10,
            2 * most_other,
            torch.where(most_other > 0, logits.gather(1, other), 0.0) / 4,
            size[..., 0],
            size[..., 1],
        ],
        dim=-1,
    )


@functools.lru_cache(maxsize=16)
def _scale(height: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the cached divisor (4,) that converts x1 y1 x2 y2 from pixels to fractions of the crop."""
    with torch.inference_mode(False):
        return torch.tensor([width, height, width, height], dtype=torch.float32, device=device)


def _each(operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Apply an operation to all pairs of M values. An input (N, M) gives a result (N, M, M)."""
    return operation(rows.unsqueeze(2), rows.unsqueeze(1))


def _pick(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return rows.gather(1, order.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
