"""A capture that fails leaves the device as it was."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.runtime.graph_capture import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


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
