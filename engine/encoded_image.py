"""An image that is encoded already, for tasks to be asked of. Knows no models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from saccade.engine.core.adapters import Adapter
from saccade.engine.core.step import KeptPrefix
from saccade.engine.errors import AdapterError
from saccade.engine.image import Image, LazyImage, Pixels, as_pixels
from saccade.engine.tasks.task import Task


class PrefixKeeper(Protocol):
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

    def __init__(self, width: int, height: int, kept: KeptPrefix, adapter: Adapter | None, loop: PrefixKeeper) -> None:
        self._closed, self._process = False, os.getpid()
        self.width, self.height = width, height
        self.kept, self._adapter, self._loop = kept, adapter, loop

    def adapter_for(self, loop: PrefixKeeper, asked: Adapter | None) -> Adapter | None:
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


@dataclass(slots=True, frozen=True)
class Source:
    """What tasks are asked of: an image, or a kept prefix of an image of `size`, or neither.

    Attributes:
        image: its pixels, or what gives it.
        prefix: a kept prefix.
        size: its image's width and height in pixels.
        adapter: what all is computed with besides the model.
    """

    image: Pixels | LazyImage | None
    prefix: KeptPrefix | None
    size: tuple[int, int]
    adapter: Adapter | None


def source_of(
    image: Image | LazyImage | EncodedImage | None,
    loop: PrefixKeeper,
    adapter: Adapter | None,
    tasks: Sequence[Task],
    tiles: int,
) -> Source:
    """Check that the tasks can be asked of what was given for an image.

    Raises:
        ValueError: if the image is not what it should be, a task needs one, `tiles` is not 1 or more, or not 1 with an
            encoded image.
        AdapterError: if another adapter is asked for than an image was encoded with.
    """
    if not isinstance(tiles, int) or tiles < 1:
        raise ValueError(f"tiles is a whole number of 1 or more; got {tiles!r}")
    if isinstance(image, EncodedImage):
        if tiles != 1:
            raise ValueError("an encoded image has no tiles: submit the image itself")
        return Source(None, image.kept, (image.width, image.height), image.adapter_for(loop, adapter))
    if image is not None:
        return Source(image if callable(image) else as_pixels(image), None, (0, 0), adapter)
    if lacking := next((task.asked for task in tasks if task.needs_image), None):
        raise ValueError(f"'{lacking}' can only be asked of an image")
    return Source(None, None, (0, 0), adapter)
