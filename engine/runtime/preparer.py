"""Threads that cut the images of admitted requests into crops while steps run. Knows no steps and no devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from saccade.engine.core.step import ImageRequest

Deliver = Callable[[ImageRequest[Any], Any, BaseException | None], None]
"""Called with a request, and its image or the error that there was instead."""


class Preparer:
    """Some daemon threads: the first starts at once, the others with the requests that follow each other.

    Args:
        n_threads: most of them.
        deliver: called in one of them for each request; must not raise.
    """

    def __init__(self, n_threads: int, deliver: Deliver) -> None:
        self._requests: SimpleQueue[ImageRequest[Any] | None] = SimpleQueue()
        self._deliver = deliver
        self._most, self._threads = n_threads, list[threading.Thread]()
        self._start()

    def put(self, request: ImageRequest[Any]) -> None:
        """Prepare a request's image; called by one thread."""
        if len(self._threads) < self._most:
            self._start()
        self._requests.put(request)

    def close(self) -> None:
        """End the threads after what they have, and wait for that."""
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        name = f"saccade-prepare-{1 + len(self._threads)}"
        thread = threading.Thread(target=_run, args=(self._requests, self._deliver), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


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
