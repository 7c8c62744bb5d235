"""What the loop asks of a device. Implemented by `cpu_executor` and `cuda_executor`; both run the same steps.

Streams and events are alike on both: on a CPU a stream is one worker thread that runs its work in order, so overlap and
order are as real there as on a GPU, and so are mistakes in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from saccade.engine.core.request import ImageT, Step
from saccade.engine.fallbacks import Fallbacks
from saccade.engine.image import Pixels
from saccade.engine.tasks.output_state import Sampled

Progress = Callable[[int, int], None]
"""Called with how many parts of something are done, and of how many."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come this far."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has come this far.

        Raises:
            BaseException: what any work before this point, since the event before it, has raised.
        """
        ...


class Watcher(Protocol):
    """Notified when work on a stream has run."""

    def about(self) -> Any:
        """What the work is that is being submitted; called in the submitting thread."""
        ...

    def ran(self, about: Any, start: float, end: float) -> None:
        """It has run, from `start` to `end` in seconds of `time.perf_counter`. Called in the stream's order."""
        ...


class Stream(Protocol):
    """Work that runs in the order it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream; does not wait for it.

        Raises:
            BaseException: what the work has raised, if it was run here; else its event raises it.
        """
        ...

    def record(self) -> Event:
        """An event behind all work given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event."""
        ...

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher, or none any more, of the work submitted from now on."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Notify the watcher of what has run by now, or wait for all that was submitted; any thread may call this."""
        ...

    def close(self) -> None:
        """End the stream after the work it has."""
        ...


class Executor(Protocol[ImageT]):
    """One model on one device, with `depth` step slots. `prepare` may be called by any thread, the rest by one.

    Attributes:
        products: what most products are computed in.
        fallbacks: what runs slower than it could here; there may be more later.
    """

    products: torch.dtype
    fallbacks: Fallbacks

    @property
    def encoder(self) -> object:
        """What encodes crops: the model's vision encoder, or a faster form of it."""
        ...

    @property
    def streams(self) -> Mapping[str, Stream]:
        """By name: 'compute' and 'copy'."""
        ...

    def prepare(self, image: Pixels) -> ImageT:
        """Cut an image, (height, width, 3) uint8 RGB or as a video decoder gives it, into crops."""
        ...

    def launch(self, slot: int, step: Step[ImageT]) -> None:
        """Put a step's forward on the compute stream."""
        ...

    def finalize(self, slot: int, step: Step[ImageT]) -> None:
        """Put a step's sampling on the compute stream, and the copy of its values on the copy stream behind it.

        To be called once the step ahead is committed, if any row writes text: what a grammar allows depends on it.
        """
        ...

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        """Have a callback called, in any thread, whenever a step's values are there; False where `has_run` must do."""
        ...

    def has_run(self, slot: int) -> bool:
        """Whether a finalized step's values are there, or it has failed."""
        ...

    def wait(self, slot: int, step: Step[ImageT]) -> None:
        """Wait until it has run.

        Raises:
            BaseException: as `read`, which raises it again.
        """
        ...

    def read(self, slot: int, step: Step[ImageT]) -> list[Sampled]:
        """The values of a step that has run, one tuple a row.

        Raises:
            BaseException: what any part of the step has raised.
        """
        ...

    def close(self) -> None:
        """Wait for the work on the streams, and end them."""
        ...
