from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from saccade.engine.cpu.threads import (
    ImageThreads,
    one_thread,
    set_threads,
    step_threads,
)


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


def run_images(threads: ImageThreads, seconds: dict[int, float], images: int) -> Counter[int]:
    """How many images ran on each number of threads, if they take so long there."""
    used: Counter[int] = Counter()
    for _ in range(images):
        number = threads.choose()
        threads.took(seconds[number])
        used[number] += 1
    return used


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({1: 30.0, 2: 20.0}, 2),
        ({1: 30.0, 2: 28.5}, 1),  # not worth the CPU
        ({1: 30.0, 2: 90.0}, 1),
    ],
)
def test_images_run_on_the_threads_that_pay_off(seconds: dict[int, float], wanted: int) -> None:
    used = run_images(ImageThreads(1, 2), seconds, 2000)
    assert used[wanted] > 1900
    assert used[3 - wanted] >= 6  # the other one is tried again, more and more seldom


def test_the_number_of_threads_follows_what_runs_beside() -> None:
    threads, alone, beside = ImageThreads(1, 2), {1: 30.0, 2: 20.0}, {1: 40.0, 2: 90.0}
    for _ in range(3):
        run_images(threads, alone, 500)
        assert run_images(threads, alone, 100)[2] >= 90
        assert run_images(threads, beside, 20)[1] >= 10
        assert run_images(threads, beside, 300) == {1: 300}


def test_one_slow_image_changes_no_number_of_threads() -> None:
    threads = ImageThreads(1, 2)
    run_images(threads, {1: 30.0, 2: 20.0}, 100)
    for _ in range(20):
        assert run_images(threads, {2: 500.0}, 1) + run_images(threads, {2: 20.0}, 9) == {2: 10}


def test_the_first_image_of_a_trial_is_not_counted() -> None:
    threads = ImageThreads(1, 2)
    run_images(threads, {1: 30.0}, 9)
    assert run_images(threads, {2: 900.0}, 1) + run_images(threads, {2: 20.0}, 16) == {2: 17}
    assert threads.choose() == 2


def test_one_number_of_threads_is_not_chosen_from() -> None:
    assert run_images(ImageThreads(3, 3), {3: 1.0}, 300) == {3: 300}
