from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from saccade.engine.runtime.cpu_settings import one_thread, set_threads, step_threads


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


needs_openmp = pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="this torch has no OpenMP")


@needs_openmp
def test_a_block_of_one_thread_leaves_the_number_as_it_was() -> None:
    def run() -> list[int]:
        set_threads(3)
        with suppress(ValueError), one_thread():
            within = torch.get_num_threads()
            raise ValueError
        return [within, torch.get_num_threads()]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == [1, 3]


@needs_openmp
@pytest.mark.parametrize(
    ("cpus", "torch_has", "set_by", "wanted"),
    [(2, 2, None, 1), (1, 1, None, 1), (8, 8, None, 4), (8, 3, None, 3), (4, 8, None, 2), (2, 2, "2", 2)],
)
def test_a_step_leaves_cpus_to_others_unless_set_to(
    cpus: int, torch_has: int, set_by: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by)

    def run() -> int:
        set_threads(torch_has)
        return step_threads()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == wanted
