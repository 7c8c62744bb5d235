"""BackgroundLoop: woken from other threads, ended in bounded time however its work behaves, and its failures."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from saccade.sinks import SinkError
from saccade.sinks.backoff import backoff_s
from saccade.sinks.messaging import background_loop as loop_module
from saccade.sinks.messaging.background_loop import BackgroundLoop


@pytest.mark.parametrize(
    ("failures", "chance", "expected"),
    [(1, 0.0, 0.5), (2, 0.0, 1.0), (3, 1.0, 1.5), (6, 0.0, 16.0), (7, 0.0, 30.0), (10**6, 1.0, 22.5)],
)
def test_backoff_grows_and_is_capped(failures: int, chance: float, expected: float) -> None:
    assert backoff_s(failures, lambda: chance) == expected


def test_a_loop_is_woken_and_ends_on_close() -> None:
    turns: list[float] = []
    turned = threading.Semaphore(0)

    async def work(loop: BackgroundLoop) -> None:
        while not loop.stopping:
            turns.append(time.monotonic())
            turned.release()
            await loop.wait(60)

    loop = BackgroundLoop("test", work)
    for _ in range(3):
        assert turned.acquire(timeout=10)
        loop.wake()
    assert turned.acquire(timeout=10)
    begun = time.monotonic()
    loop.close(10)
    loop.close(10)
    loop.wake()
    loop.check()
    assert time.monotonic() - begun < 5
    assert len(turns) == 4


def test_a_sleep_is_interrupted_by_close_and_not_by_wake() -> None:
    rested: list[float] = []
    resting = threading.Event()

    async def work(loop: BackgroundLoop) -> None:
        for seconds in (0.3, 60):
            begun = time.monotonic()
            await loop.sleep(seconds)
            rested.append(time.monotonic() - begun)
            resting.set()

    loop = BackgroundLoop("test", work)
    while not resting.is_set():
        loop.wake()
        time.sleep(0.01)
    loop.close(10)
    assert rested[0] >= 0.3
    assert rested[1] < 30


def test_work_that_does_not_end_is_cancelled() -> None:
    cut = threading.Event()

    async def work(loop: BackgroundLoop) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cut.set()
            raise

    loop = BackgroundLoop("test", work)
    begun = time.monotonic()
    loop.close(0.1)
    assert time.monotonic() - begun < 5
    assert cut.is_set()


def test_work_that_cannot_be_cancelled_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "_CANCEL_S", 0.2)
    release = threading.Event()

    async def work(loop: BackgroundLoop) -> None:
        release.wait(10)

    loop = BackgroundLoop("test", work)
    loop.close(0.1)
    assert "does not end" in caplog.text
    release.set()
    loop._thread.join(10)
    assert not loop._thread.is_alive()


def test_check_raises_after_the_work_failed() -> None:
    failed = threading.Event()

    async def work(loop: BackgroundLoop) -> None:
        failed.set()
        raise RuntimeError("ours")

    loop = BackgroundLoop("mqtt://host", work)
    assert failed.wait(10)
    loop.close(10)
    with pytest.raises(SinkError, match=r"mqtt://host failed: RuntimeError\('ours'\)"):
        loop.check()
