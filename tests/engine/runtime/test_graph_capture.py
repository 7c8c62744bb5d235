"""Work runs each time it is asked for, with a graph or without; a capture that fails leaves the device as it was."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from saccade.engine.errors import Fallbacks
from saccade.engine.runtime.graph_capture import Graphs, GraphsByKind, captured
from tests.support.engine.eager_cuda import Now

CAPTURED = "saccade.engine.runtime.graph_capture.captured"


class Replayed:
    """A graph on no device: it runs the work that it was captured from, and says so."""

    def __init__(self, work: Callable[[], None], done: list[str]) -> None:
        self._work, self._done = work, done

    def replay(self) -> None:
        self._work()
        self._done[-1] += " from its graph"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return Graphs(Now(), Fallbacks())  # type: ignore[arg-type]


def test_work_is_captured_when_it_is_met(graphs: Graphs) -> None:
    done: list[str] = []
    with mock.patch(CAPTURED, lambda work, _: Replayed(work, done)):
        for key in "aabab":
            graphs.run(key, lambda key=key: done.append(key))  # type: ignore[misc]
    assert done == ["a", "a from its graph", "b", "a from its graph", "b from its graph"]
    assert len(graphs) == 2


def test_without_memory_for_a_graph_work_runs_once_and_that_is_remembered(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def captured_once(work: Callable[[], None], _: object) -> Replayed:
        if "big" in done[-1]:
            raise RuntimeError("CUDA error: out of memory\nlines of advice")  # the driver's error is of no other type
        return Replayed(work, done)

    with mock.patch(CAPTURED, side_effect=captured_once) as capture, caplog.at_level(logging.WARNING):
        for key in ("small", "big", "big", "small", "also big", "also big", "big"):
            graphs.run(key, lambda key=key: done.append(key))  # type: ignore[misc]
    assert done == ["small", "big", "big", "small from its graph", "also big", "also big", "big"]
    assert capture.call_count == 3, "each is tried once"
    assert [record.getMessage() for record in caplog.records] == [
        "some steps take longer without a CUDA graph, because its capture ran out of memory: CUDA error: out of memory"
    ]
    assert graphs._fallbacks == caplog.messages
    assert "small" in graphs
    assert "big" not in graphs


def test_a_capture_that_fails_for_a_moment_is_tried_again(graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    """Where a decoder is opened in another thread, the driver ends captures that are under way."""
    done: list[str] = []
    outcomes = [RuntimeError("CUDA error: operation failed due to a previous error during capture"), None]

    def captured_later(work: Callable[[], None], _: object) -> Replayed:
        if (error := outcomes.pop(0)) is not None:
            raise error
        return Replayed(work, done)

    with mock.patch(CAPTURED, side_effect=captured_later) as capture, caplog.at_level(logging.WARNING):
        for _ in range(11):
            graphs.run("a", lambda: done.append("a"))
    assert done == ["a"] * 10 + ["a from its graph"]
    assert capture.call_count == 2
    assert graphs._fallbacks == caplog.messages == []


def test_work_that_fails_is_not_captured(graphs: Graphs) -> None:
    def fails() -> None:
        raise ValueError("wrong")

    with mock.patch(CAPTURED) as capture, pytest.raises(ValueError, match="wrong"):
        graphs.run("a", fails)
    assert not capture.called


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Graphs of an earlier engine in the garbage, destroyed in the capturing thread, would end the capture."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock)
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
        captured(work, None)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_another_graph_can_be_captured_behind_one_that_failed() -> None:
    numbers, memory = torch.zeros(8, device="cuda"), torch.cuda.graph_pool_handle()
    numbers.add_(0)  # loads the kernel
    torch.cuda.synchronize()

    def fails() -> None:
        numbers.add_(1)
        raise torch.OutOfMemoryError("no more")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphs = [captured(lambda: numbers.add_(1), memory)]
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                captured(fails, memory)
            graphs.append(captured(lambda: numbers.add_(10), memory))
        for graph in graphs:
            graph.replay()
        stream.synchronize()
    assert numbers.tolist() == [21] * 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_work_is_captured_after_its_buffers_are_written() -> None:
    device = torch.device("cuda")
    buffer, seen = torch.zeros(8, device=device), torch.zeros(8, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # 0.1 s, as behind other programs on the GPU
    buffer.fill_(1)
    GraphsByKind[None](device, 1).capture(None, "work", lambda: (seen.copy_(buffer), ([], []))[1])
    torch.cuda.synchronize()
    assert seen.tolist() == [1] * 8
