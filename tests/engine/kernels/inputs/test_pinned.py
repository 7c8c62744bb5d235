"""What kernels read from the host's memory is what the host has written last."""

from __future__ import annotations

import pytest
import torch

from tests.support.engine.kernels import DEVICE, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("count", [1, 512, 1024, 5000])
def test_numbers_are_fetched_as_they_are_now(count: int) -> None:
    from saccade.engine.kernels.inputs.pinned import fetch

    host = torch.zeros(count, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    there = torch.full((count + 1,), 7, dtype=torch.int32, device=DEVICE)
    for start in (0, 1000, -5):
        host.copy_(torch.arange(start, start + count))
        fetch(host, there[:count])
        assert torch.equal(there[:count].cpu(), host)
    assert there[count] == 7


@pytest.mark.parametrize("size", [8, 256, 30000 * 8, 8 * 1024 * 3])
def test_an_image_is_fetched_from_where_its_ticket_says(size: int) -> None:
    from saccade.engine.kernels.inputs.pinned import fetch_image

    pinned = DEVICE == "cuda"
    images = [torch.randint(0, 256, (size + 64,), dtype=torch.uint8, pin_memory=pinned) for _ in range(3)]
    ticket = torch.zeros(16, dtype=torch.int64, pin_memory=pinned)
    about = torch.full((14,), -1, dtype=torch.int64, device=DEVICE)
    pixels = torch.full((size + 8,), 7, dtype=torch.uint8, device=DEVICE)
    for number, image in enumerate(images):
        ticket[:] = torch.arange(16) + 100 * number
        ticket[13] = image.data_ptr() + 64
        fetch_image(ticket, about[:13], pixels[:size])
        assert torch.equal(pixels[:size].cpu(), image[64:])
        assert about.tolist() == [*range(100 * number, 100 * number + 13), -1]
    assert (pixels[size:] == 7).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs graphs")
def test_a_graph_fetches_what_the_host_wrote_before_each_replay() -> None:
    from saccade.engine.kernels.inputs.pinned import fetch

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
