from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.host import share_among


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.openmp.is_available(), reason="this torch has no OpenMP of its own"
)
def test_a_thread_says_for_itself_how_many_work_for_it() -> None:
    before = torch.get_num_threads()

    def share(threads: int) -> int:
        share_among(threads)
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        assert one.submit(share, 1).result() == 1
        assert other.submit(torch.get_num_threads).result() == before == torch.get_num_threads()
        assert one.submit(share, before + 1).result() == before + 1
