"""YUV planes of a decoded frame, for conversion to RGB elsewhere, for example on the GPU."""

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
"""`YuvPlanes.matrix` by H.273's number. Other numbers, such as "unspecified", use BT.601, as in swscale."""
_FULL_RANGE = 2
_FORMATS = ("yuv420p", "yuvj420p", "nv12")


class Plane(Protocol):
    """One plane of a YUV frame in main memory or on a GPU, uint8.

    Its shape is (height, width), or (height, width, 2) for interleaved chroma.
    """

    def __dlpack__(self) -> Any:
        """Return the plane as a DLPack capsule.

        If the plane is on a GPU, the legacy default CUDA stream may still be writing it.
        """
        ...


@dataclass(slots=True, frozen=True)
class YuvPlanes:
    """The planes of a decoded 8-bit YUV 4:2:0 frame.

    Attributes:
        planes: the luma plane, followed by one interleaved chroma plane (NV12) or two chroma planes.
        matrix: coefficients of limited-range YUV to RGB, times 65536: V to red, U to blue, U to green, V to green. The
            last two are subtracted.
        full_range: whether values range from 0 to 255; otherwise luma from 16 to 235 and chroma from 16 to 240.
        gpu: index of the GPU that stores the planes; None for main memory.
    """

    planes: tuple[Plane, ...]
    matrix: tuple[int, int, int, int]
    full_range: bool
    gpu: int | None = None


def planes_of(frame: av.VideoFrame) -> YuvPlanes | None:
    """Return the YUV planes of a frame; None if the frame is rotated, has an odd size or is not 8-bit 4:2:0."""
    on_gpu = frame.format.name == "cuda"
    form = frame.sw_format if on_gpu else frame.format
    if form is None or form.name not in _FORMATS or frame.width % 2 or frame.height % 2 or frame.rotation:
        return None
    planes: tuple[Any, ...] = frame.planes
    matrix = _MATRICES.get(frame.colorspace, _BT601)
    full = frame.color_range == _FULL_RANGE or form.name == "yuvj420p"
    return YuvPlanes(planes, matrix, full, planes[0].__dlpack_device__()[1] if on_gpu else None)
