"""The planes of a decoded frame, before it is RGB: for what converts it where it is, such as on a GPU.

Knows nothing of decoders, models or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import av

_BT601 = 104597, 132201, 25675, 53279
_BT2020 = 110013, 140363, 12277, 42626
_MATRICES = {
    1: (117489, 138438, 13975, 34925),  # BT.709
    4: (104448, 132798, 24759, 53109),  # FCC
    7: (117579, 136230, 16907, 35559),  # SMPTE 240M
    9: _BT2020,
    10: _BT2020,
}
"""By H.273's number, `YuvPlanes.matrix`; others, as "unspecified", are BT.601, as in swscale."""
_FULL_RANGE = 2
_FORMATS = ("yuv420p", "yuvj420p", "nv12")


class Plane(Protocol):
    """A plane in main memory or on a GPU, (height, width) or, of two kinds of pixels, (height, width, 2) uint8."""

    def __dlpack__(self) -> Any:
        """A capsule of it; on a GPU, what writes it may still be queued on the device's legacy default stream."""
        ...


@dataclass(slots=True, frozen=True)
class YuvPlanes:
    """A frame of 8-bit YUV 4:2:0.

    Attributes:
        planes: luma; then both chroma planes in one (NV12), or each.
        matrix: what red has of v and blue of u, and green has less by u and by v, times 65536 for a range of 16 to
            240.
        full_range: whether values use all of 0 to 255, not 16 to 235 (chroma: 240).
        gpu: number of the GPU they are on; None in main memory.
    """

    planes: tuple[Plane, ...]
    matrix: tuple[int, int, int, int]
    full_range: bool
    gpu: int | None = None


def planes_of(frame: av.VideoFrame) -> YuvPlanes | None:
    """The planes of a frame that is upright as it is; None if it is not, or no 8-bit 4:2:0 of even sides."""
    on_gpu = frame.format.name == "cuda"
    form = frame.sw_format if on_gpu else frame.format
    if form is None or form.name not in _FORMATS or frame.width % 2 or frame.height % 2 or frame.rotation:
        return None
    planes: tuple[Any, ...] = frame.planes
    matrix = _MATRICES.get(frame.colorspace, _BT601)
    full = frame.color_range == _FULL_RANGE or form.name == "yuvj420p"
    return YuvPlanes(planes, matrix, full, planes[0].__dlpack_device__()[1] if on_gpu else None)
