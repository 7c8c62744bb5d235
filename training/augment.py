"""Random augmentation of batches of images and their boxes, on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from training.data import SIDE, Split

_MIN_SIDE = 0.012  # a box narrower than 3 of 256 pixels is an ignore region
_MIN_SEEN = 0.3  # so is one of which less than this part is left in the view; under a third of that it is gone
_MOSAIC_CELLS = 4
_FAR = 1.0, 2.0  # sides of a far view's windows, in those of an image


@dataclass(slots=True)
class Batch:
    """A batch of B augmented images with their labels.

    Attributes:
        images: (B, 3, height, width) float from -1 to 1.
        boxes: (B, M, 4) float32 cx cy w h as fractions of the image.
        labels: (B, M) int64 class IDs, -1 for padding.
        sure: (B, M) bool, False for boxes with an uncertain label. The losses ignore these boxes.
        unknown: (B, classes) bool, True if objects of the class are not labelled in the image.
    """

    images: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor
    sure: torch.Tensor
    unknown: torch.Tensor


def make_batch(
    split: Split, index: torch.Tensor, size: tuple[int, int], mosaic: float, keep: int = 48, far: float = 0.0
) -> Batch:
    """Create a batch of randomly augmented images.

    Args:
        split: dataset images on the GPU.
        index: (B,) int64 indices of the images to augment.
        size: height and width of the augmented images in pixels; even numbers.
        mosaic: fraction of augmented images that are mosaics: the image and three random images in a 2×2 grid.
        keep: maximum number of boxes per augmented image. The largest boxes are kept.
        far: fraction of augmented images that are mosaics of shrunk images.
    """
    n_mosaic, n_far = int(len(index) * mosaic), int(len(index) * far)
    parts = []
    for first, n, zoom in ((0, n_mosaic, (0.6, 1.2)), (n_mosaic, n_far, _FAR)):
        if n:
            others = torch.randint(len(split.images), (n, _MOSAIC_CELLS), device=index.device)
            others[:, 0] = index[first : first + n]
            half = size[0] // 2, size[1] // 2
            parts.append(_join(_view(split, others.flatten(), half, zoom=zoom, identity=0.0), n))
    if n_mosaic + n_far < len(index):
        parts.append(_view(split, index[n_mosaic + n_far :], size, zoom=(0.45, 1.3), identity=0.25))
    images = _cover(_recolour(torch.cat([part.images for part in parts])))
    slots = max(part.labels.shape[1] for part in parts)
    boxes = torch.cat([F.pad(part.boxes, (0, 0, 0, slots - part.boxes.shape[1])) for part in parts])
    labels = torch.cat([F.pad(part.labels, (0, slots - part.labels.shape[1]), value=-1) for part in parts])
    sure = torch.cat([F.pad(part.sure, (0, slots - part.sure.shape[1])) for part in parts])
    area = torch.where(labels >= 0, boxes[..., 2] * boxes[..., 3], -1.0)
    order = area.topk(min(keep, slots), dim=1).indices
    return Batch(
        images,
        boxes.gather(1, order.unsqueeze(-1).expand(-1, -1, 4)),
        labels.gather(1, order),
        sure.gather(1, order),
        torch.cat([part.unknown for part in parts]),
    )


def _uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.empty_like(like).uniform_(low, high)


def _view(
    split: Split, index: torch.Tensor, size: tuple[int, int], zoom: tuple[float, float], identity: float
) -> Batch:
    """Return a random crop of each image, or the whole image with the probability `identity`, randomly mirrored."""
    device = index.device
    one = torch.ones(len(index), device=device)
    scale = torch.exp(_uniform(one, torch.tensor(zoom[0]).log().item(), torch.tensor(zoom[1]).log().item()))
    stretch = torch.exp(_uniform(one, -0.25, 0.25))
    whole = torch.rand_like(one) < identity
    window = torch.stack([scale * stretch, scale / stretch], dim=1)
    window = torch.where(whole.unsqueeze(1), 1.0, window)
    # A window smaller than the image lies inside it, a larger one holds it.
    corner = torch.rand_like(window) * (1.0 - window)
    mirror = torch.rand_like(one) < 0.5
    images = _sample(split, index, size, corner, window, mirror, 2 if zoom == _FAR else 1)

    boxes = split.boxes[index]
    low, high = boxes[..., :2], boxes[..., 2:]
    low = (low - corner.unsqueeze(1)) / window.unsqueeze(1)
    high = (high - corner.unsqueeze(1)) / window.unsqueeze(1)
    flipped_low = torch.stack([1 - high[..., 0], low[..., 1]], dim=-1)
    flipped_high = torch.stack([1 - low[..., 0], high[..., 1]], dim=-1)
    low = torch.where(mirror.view(-1, 1, 1), flipped_low, low)
    high = torch.where(mirror.view(-1, 1, 1), flipped_high, high)
    full = (high - low).prod(-1).clamp(min=1e-9)
    low, high = low.clamp(0, 1), high.clamp(0, 1)
    sides = high - low
    seen = sides.prod(-1) / full
    labels = torch.where(seen >= _MIN_SEEN / 3, split.labels[index], -1)
    sure = split.sure[index] & (seen >= _MIN_SEEN) & (sides.amin(-1) >= _MIN_SIDE)
    return Batch(images, torch.cat([(low + high) / 2, sides], dim=-1), labels, sure, split.unknown[index])


def _sample(
    split: Split,
    index: torch.Tensor,
    size: tuple[int, int],
    corner: torch.Tensor,
    window: torch.Tensor,
    mirror: torch.Tensor,
    finer: int,
) -> torch.Tensor:
    """Resize crops of images to `size` (height and width in pixels), with anti-aliasing by supersampling."""
    height, width = size
    more = finer * (2 if width < SIDE * 0.75 else 1)
    device = index.device
    across = (torch.arange(more * width, device=device) + 0.5) / (more * width)
    down = (torch.arange(more * height, device=device) + 0.5) / (more * height)
    x = torch.where(mirror.unsqueeze(1), 1 - across, across)
    x = (corner[:, :1] + x * window[:, :1]) * split.sizes[index, :1]
    y = (corner[:, 1:] + down * window[:, 1:]) * split.sizes[index, 1:]
    grid = torch.stack(torch.broadcast_tensors(x.unsqueeze(1), y.unsqueeze(2)), dim=-1) * 2 - 1
    images = split.images[index].float().div_(127.5).sub_(1.0)
    read = F.grid_sample(images, grid, align_corners=False)
    return F.avg_pool2d(read, more) if more > 1 else read


def _join(cells: Batch, n: int) -> Batch:
    """Combine each group of four images into one mosaic (2×2 images) with their labels."""
    height, width = cells.images.shape[2:]
    grid = cells.images.view(n, 2, 2, 3, height, width).permute(0, 3, 1, 4, 2, 5).reshape(n, 3, 2 * height, 2 * width)
    corner = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5], [0.5, 0.5]], device=grid.device)
    boxes = cells.boxes.view(n, _MOSAIC_CELLS, -1, 4) / 2
    boxes[..., :2] += corner.view(1, _MOSAIC_CELLS, 1, 2)
    labels = cells.labels.view(n, -1)
    boxes = boxes.flatten(1, 2)
    sure = cells.sure.view(n, -1) & (boxes[..., 2:].amin(-1) >= _MIN_SIDE)
    return Batch(grid, boxes, labels, sure, cells.unknown.view(n, _MOSAIC_CELLS, -1).any(1))


def _recolour(images: torch.Tensor) -> torch.Tensor:
    """Randomly change the brightness, contrast, saturation and white balance of images. Blur some images."""
    n = len(images)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(n, 1, 1, 1, device=images.device) < p

    def gain(spread: float, channels: int = 1) -> torch.Tensor:
        return 1 + (torch.rand(n, channels, 1, 1, device=images.device) * 2 - 1) * spread

    x = images.float()
    x = (x + 1) * gain(0.4) * torch.where(chance(0.4), gain(0.25, 3), 1.0) - 1
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * gain(0.35) + mean
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * torch.where(chance(0.08), 0.0, gain(0.5))
    x = torch.where(chance(0.12), F.avg_pool2d(x, 3, 1, 1), x)
    small = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0, mode="bilinear", align_corners=False)
    x = torch.where(chance(0.08), small, x)
    x = x + torch.randn_like(x) * torch.where(chance(0.25), torch.rand(n, 1, 1, 1, device=x.device) * 0.12, 0.0)
    return x.clamp(-1, 1)


def _cover(images: torch.Tensor) -> torch.Tensor:
    """Cover a random rectangle with grey or noise in 40 % of the images (random erasing)."""
    n, _, height, width = images.shape
    side = torch.rand(n, 2, device=images.device) * 0.2 + 0.05
    corner = torch.rand(n, 2, device=images.device) * (1 - side)
    rows = torch.arange(height, device=images.device) / height
    columns = torch.arange(width, device=images.device) / width
    in_rows = (rows >= corner[:, :1]) & (rows < corner[:, :1] + side[:, :1])
    in_columns = (columns >= corner[:, 1:]) & (columns < corner[:, 1:] + side[:, 1:])
    chosen = (torch.rand(n, device=images.device) < 0.4).view(n, 1, 1)
    covered = (in_rows.unsqueeze(2) & in_columns.unsqueeze(1) & chosen).unsqueeze(1)
    paint = torch.randn_like(images) * (torch.rand(n, 1, 1, 1, device=images.device) < 0.5) * 0.5
    return torch.where(covered, paint.clamp(-1, 1), images)
