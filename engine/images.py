"""What tasks are asked of: an image as an array or a tensor, or one that is encoded already. Knows no models."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.errors import AdapterError
from saccade.engine.scheduling.adapter_slots import Adapter
from saccade.engine.scheduling.step import KeptPrefix

Image = NDArray[np.uint8] | torch.Tensor
"""An image: (height, width, 3) uint8 RGB, array or tensor."""


class _Loop(Protocol):
    """What keeps prefixes."""

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release one; any thread may call this."""


class EncodedImage:
    """An image whose prefix stays in an engine's cache, to be asked about again and again, see `Engine.encode`.

    It holds pages of the cache until it is closed: by `close`, by leaving a `with`, or when it is dropped. What is
    asked already is still answered then.

    Args:
        width, height: of the image in pixels.
        kept: its prefix.
        adapter: what that was computed with besides the model.
        loop: where it is kept.

    Attributes:
        width, height: as above.
    """

    __slots__ = ("__weakref__", "_adapter", "_closed", "_loop", "_process", "height", "kept", "width")

    def __init__(self, width: int, height: int, kept: KeptPrefix, adapter: Adapter | None, loop: _Loop) -> None:
        self._closed, self._process = False, os.getpid()
        self.width, self.height = width, height
        self.kept, self._adapter, self._loop = kept, adapter, loop

    def adapter_for(self, loop: _Loop, asked: Adapter | None) -> Adapter | None:
        """The adapter that it was prefilled with, and is asked with.

        Raises:
            ValueError: if it is kept by another loop.
            AdapterError: if another adapter is asked for.
        """
        if loop is not self._loop:
            raise ValueError("this image was encoded by another engine")
        if asked not in (None, self._adapter):
            raise AdapterError("an encoded image is asked with the adapter that it was encoded with")
        return self._adapter

    def close(self) -> None:
        """Give its pages back. Closing twice does nothing."""
        closed, self._closed = self._closed, True
        if not closed and os.getpid() == self._process:  # in a forked child another thread may hold the loop's lock
            self._loop.release_prefix(self.kept)

    def __enter__(self) -> EncodedImage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def as_array(image: Image) -> NDArray[np.uint8]:
    """An image as an array.

    Raises:
        ValueError: if it is not (height, width, 3) uint8 with at least one pixel.
    """
    if isinstance(image, torch.Tensor) and image.dtype != torch.uint8:
        raise ValueError(f"an image is (height, width, 3) uint8 RGB; got {tuple(image.shape)} {image.dtype}")
    array = image.numpy(force=True) if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
        raise ValueError(f"an image is (height, width, 3) uint8 RGB; got {array.shape} {array.dtype}")
    return array
