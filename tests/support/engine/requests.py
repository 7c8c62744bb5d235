"""Requests whose windows are given, without tasks, for tests of what is below the engine's face."""

from __future__ import annotations

import math
from collections.abc import Callable

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import ImageT, KeptPrefix, PrefillWindow, Request, Sequence
from saccade.engine.models.protocol import Adapter

Done = Callable[[Request[ImageT], BaseException | None], None]


def ignore(request: Request[ImageT], error: BaseException | None) -> None:
    """What nobody waits for."""


def request_of(
    image: ImageT | None,
    sequences: list[Sequence[ImageT]],
    done: Done[ImageT] = ignore,
    deadline: float = math.inf,
    adapter: Adapter | None = None,
    *,
    frame: bool = False,
    windows: int = 1,
    reads: KeptPrefix | None = None,
    keeps: KeptPrefix | None = None,
) -> Request[ImageT]:
    """A request of one window, or of several without prompts; a frame's are made once it is admitted."""

    def make(request: Request[ImageT]) -> list[PrefillWindow[ImageT]]:
        return [PrefillWindow(request, [] if number else sequences, image, number=number) for number in range(windows)]

    request = Request(make, done, deadline, adapter, reads, keeps, frame=frame)
    if not frame:
        request.windows = make(request)
    return request


def sizes(page_size: int, batch_slots: int, together: int, n_adapters: int = 0, *, drafts: bool = True) -> EngineConfig:
    """The sizes of a scheduler."""
    return EngineConfig(
        max_sequences=batch_slots,
        page_size=page_size,
        images_per_prefill=together,
        adapter_slots=n_adapters,
        drafts=drafts,
    )
