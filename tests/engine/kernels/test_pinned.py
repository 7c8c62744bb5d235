"""What kernels read from the host's memory is what the host has written last."""

from __future__ import annotations

import pytest
import torch

from tests.support.engine.kernels import DEVICE, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("count", [1, 512, 1024, 5000])
def test_numbers_are_fetched_as_they_are_now(count: int) -> None:
    from saccade.engine.kernels.common import fetch

    host = torch.zeros(count, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    there = torch.full((count + 1,), 7, dtype=torch.int32, device=DEVICE)
    for start in (0, 1000, -5):
        host.copy_(torch.arange(start, start + count))
        fetch(host, there[:count])
        assert torch.equal(there[:count].cpu(), host)
    assert there[count] == 7


@pytest.mark.skipif(DEVICE == "cpu", reason="needs graphs")
def test_a_graph_fetches_what_the_host_wrote_before_each_replay() -> None:
    from saccade.engine.kernels.common import fetch

    host, there = torch.zeros(600, dtype=torch.int32, pin_memory=True), torch.zeros(600, dtype=torch.int32).cuda()
    fetch(host, there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetch(host, there)
    for number in range(50):
        host.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        assert (there == number).all()
