from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from saccade.engine.runtime.cpu_settings import set_threads


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.openmp.is_available(), reason="this torch has no OpenMP of its own"
)
def test_each_thread_has_its_own_number_of_threads() -> None:
    def share(threads: int) -> int:
        set_threads(threads)
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        here, there = torch.get_num_threads(), other.submit(torch.get_num_threads).result()
        for threads in (1, 3, 2):
            assert one.submit(share, threads).result() == threads
            assert other.submit(torch.get_num_threads).result() == there
            assert torch.get_num_threads() == here
