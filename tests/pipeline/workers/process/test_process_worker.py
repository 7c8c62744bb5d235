"""A worker's process that hangs, as its supervisor sees it."""

from __future__ import annotations

import os
import signal
import threading
from queue import SimpleQueue

import pytest

from saccade.pipeline.workers.process.process_worker import ProcessWorker
from saccade.pipeline.workers.protocol import Message
from tests.pipeline.workers.process.test_worker_main import LONG_S, SETTINGS


def test_commands_do_not_wait_for_a_process_that_hangs() -> None:
    messages: SimpleQueue[Message] = SimpleQueue()
    worker = ProcessWorker("1", SETTINGS, lambda worker, message: messages.put(message))
    worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)

    def send() -> None:
        for number in range(4000):
            worker.send({"do": "close", "stream": "room" * 50, "key": number})

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(LONG_S / 4)
    waits = sending.is_alive()
    worker.kill()
    assert messages.get(timeout=LONG_S) == {"is": "ended", "reason": "SIGKILL", "code": -9}
    assert not waits


def test_its_end_is_reported_while_an_output_takes_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.pipeline.workers.process.process_worker._LAST_RESULTS_S", 0.1)
    messages: SimpleQueue[Message] = SimpleQueue()
    hung = threading.Event()
    worker = ProcessWorker(
        "1", SETTINGS, lambda worker, message: messages.put(message), lambda results: bool(hung.wait(LONG_S))
    )
    worker.start()
    worker.kill()
    try:
        assert messages.get(timeout=LONG_S / 2) == {"is": "ended", "reason": "SIGKILL", "code": -9}
    finally:
        hung.set()
