"""Which threads prepare the windows of a request, and how they are delivered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from saccade.engine.core.request import PrefillWindow, Request
from saccade.engine.runtime.loop import Prepared, Preparer

WAIT_S = 30.0
Delivered = list[tuple[int, Any, str]]
"""Number of each window, its image or error, and the thread that has delivered it."""


class Rig:
    def __init__(self) -> None:
        self._delivered: queue.SimpleQueue[Delivered] = queue.SimpleQueue()
        self.preparer = Preparer(4, self._deliver)

    def _deliver(self, made: Sequence[Prepared[Any]]) -> None:
        thread = threading.current_thread().name
        self._delivered.put([(window.number, error or image, thread) for window, image, error in made])

    def put(self, on_device: Callable[[], bool] | None, *prepare: Callable[[], object] | None) -> None:
        request: Request[Any] = Request(lambda _: [], lambda *_: None, on_device=on_device)
        self.preparer.put([PrefillWindow(request, [], prepare=one, number=i) for i, one in enumerate(prepare)])

    def next(self) -> Delivered:
        return self._delivered.get(timeout=WAIT_S)

    @property
    def at_rest(self) -> bool:
        return self._delivered.empty()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.preparer.close()


def test_windows_on_the_device_are_prepared_by_one_thread_and_delivered_together(rig: Rig) -> None:
    threads = list[str]()

    def prepare() -> str:
        threads.append(threading.current_thread().name)
        return "image"

    rig.put(lambda: True, prepare, None, prepare)
    delivered = rig.next()
    assert [(number, image) for number, image, _ in delivered] == [(0, "image"), (2, "image")], "1 was over"
    assert threads == [delivered[0][2]] * 2
    rig.preparer.close()
    assert rig.at_rest


def test_windows_in_main_memory_are_prepared_side_by_side(rig: Rig) -> None:
    together = threading.Barrier(3, timeout=WAIT_S)
    rig.put(lambda: False, *[together.wait] * 3)
    delivered = [rig.next() for _ in range(3)]
    assert sorted(made[0][0] for made in delivered) == [0, 1, 2]
    assert len({made[0][2] for made in delivered}) == 3


def test_an_image_that_cannot_be_read_is_read_once_and_is_one_error(rig: Rig) -> None:
    reads = list[str]()

    def read() -> bool:
        reads.append("")
        raise OSError("gone")

    rig.put(read, *[lambda: "image"] * 3)
    ((number, error, _),) = rig.next()
    assert (number, str(error), len(reads)) == (0, "gone", 1)
    rig.put(None, lambda: "next")
    assert rig.next()[0][1] == "next"


def test_an_error_of_one_window_leaves_the_others(rig: Rig) -> None:
    def fails() -> object:
        raise ValueError("one")

    rig.put(lambda: True, lambda: "first", fails, lambda: "last")
    first, error, last = (image for _, image, _ in rig.next())
    assert (first, str(error), last) == ("first", "one", "last")
