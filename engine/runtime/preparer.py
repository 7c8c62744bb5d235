"""Threads that cut the images of admitted requests into crops while steps run. Knows no steps and no devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from saccade.engine.scheduling.step import ImageRequest

Deliver = Callable[[ImageRequest[Any], Any, BaseException | None], None]
"""Called with a request, and its image or the error that there was instead."""


class Preparer:
    """Some daemon threads, the first of which starts with the first request.

    Args:
        n_threads: most of them.
        deliver: called in one of them for each request; must not raise.
    """

    def __init__(self, n_threads: int, deliver: Deliver) -> None:
        self._requests: SimpleQueue[ImageRequest[Any] | None] = SimpleQueue()
        self._deliver = deliver
        self._most, self._started = n_threads, 0

    def put(self, request: ImageRequest[Any]) -> None:
        """Prepare a request's image; called by one thread."""
        if self._started < self._most:
            self._started += 1
            name = f"saccade-prepare-{self._started}"
            threading.Thread(target=_run, args=(self._requests, self._deliver), name=name, daemon=True).start()
        self._requests.put(request)

    def close(self) -> None:
        """End the threads after what they have; does not wait."""
        for _ in range(self._started):
            self._requests.put(None)


def _run(requests: SimpleQueue[ImageRequest[Any] | None], deliver: Deliver) -> None:
    while (request := requests.get()) is not None:
        prepare = request.prepare
        if prepare is not None:  # else it is over
            try:
                image = prepare()
            except BaseException as error:  # of one image: the thread is there for the others
                deliver(request, None, error)
            else:
                deliver(request, image, None)
                del image
        del request, prepare  # or they would be kept until the next one
