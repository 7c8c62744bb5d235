"""Worker: woken from other threads, ended in bounded time however its work behaves, and honest about failures."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from saccade.sinks import SinkError
from saccade.sinks.messaging import background_loop as worker_module
from saccade.sinks.messaging.background_loop import Worker, backoff_s


@pytest.mark.parametrize(
    ("failures", "chance", "expected"),
    [(1, 0.0, 0.5), (2, 0.0, 1.0), (3, 1.0, 1.5), (6, 0.0, 16.0), (7, 0.0, 30.0), (10**6, 1.0, 22.5)],
)
def test_patience_grows_and_is_capped(failures: int, chance: float, expected: float) -> None:
    assert backoff_s(failures, lambda: chance) == expected


def test_it_is_woken_and_ends_when_told() -> None:
    turns: list[float] = []
    turned = threading.Semaphore(0)

    async def work(worker: Worker) -> None:
        while not worker.stopping:
            turns.append(time.monotonic())
            turned.release()
            await worker.pause(60)

    worker = Worker("test", work)
    for _ in range(3):
        assert turned.acquire(timeout=10)
        worker.wake()
    assert turned.acquire(timeout=10)
    begun = time.monotonic()
    worker.close(10)
    worker.close(10)
    worker.wake()
    worker.check()
    assert time.monotonic() - begun < 5
    assert len(turns) == 4


def test_a_rest_is_not_cut_short_by_waking_but_by_closing() -> None:
    rested: list[float] = []
    resting = threading.Event()

    async def work(worker: Worker) -> None:
        for seconds in (0.3, 60):
            begun = time.monotonic()
            await worker.rest(seconds)
            rested.append(time.monotonic() - begun)
            resting.set()

    worker = Worker("test", work)
    while not resting.is_set():
        worker.wake()
        time.sleep(0.01)
    worker.close(10)
    assert rested[0] >= 0.3
    assert rested[1] < 30


def test_work_that_does_not_end_is_cut_short() -> None:
    cut = threading.Event()

    async def work(worker: Worker) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cut.set()
            raise

    worker = Worker("test", work)
    begun = time.monotonic()
    worker.close(0.1)
    assert time.monotonic() - begun < 5
    assert cut.is_set()


def test_work_that_cannot_be_cut_short_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "_CANCEL_S", 0.2)
    release = threading.Event()

    async def work(worker: Worker) -> None:
        release.wait(10)

    worker = Worker("test", work)
    worker.close(0.1)
    assert "does not end" in caplog.text
    release.set()
    worker._thread.join(10)
    assert not worker._thread.is_alive()


def test_a_failure_is_told_to_whoever_asks() -> None:
    failed = threading.Event()

    async def work(worker: Worker) -> None:
        failed.set()
        raise RuntimeError("ours")

    worker = Worker("mqtt://host", work)
    assert failed.wait(10)
    worker.close(10)
    with pytest.raises(SinkError, match=r"mqtt://host failed: RuntimeError\('ours'\)"):
        worker.check()
