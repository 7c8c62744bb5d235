from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from saccade.pipeline.runtime.shared_threads import SharedTask, SharedThreads

LONG_S = 60  # far beyond what any of these needs; only so that a deadlock fails instead of hanging


def named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_each_call_is_followed_by_work_and_no_two_threads_do_one_task() -> None:
    threads, over = SharedThreads("many tasks"), threading.Event()
    tasks: list[SharedTask] = []
    wanted, seen, inside = [0] * 20, [0] * 20, Counter[int]()

    def work(number: int) -> None:
        inside[number] += 1
        assert inside[number] == 1
        seen[number] = wanted[number]
        inside[number] -= 1
        if seen == [200] * 20:
            over.set()

    tasks += [threads.open(lambda number=number: work(number)) for number in range(20)]  # type: ignore[misc]

    def call() -> None:
        for _ in range(200):
            for number, task in enumerate(tasks):
                wanted[number] += 1
                task.call()

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(LONG_S)
    assert over.wait(LONG_S)
    for task in tasks:
        task.close()
    assert threads.join(LONG_S)
    assert not named("many tasks")


@pytest.mark.parametrize("stuck", [1, 3])
def test_a_task_that_is_stuck_keeps_no_other_waiting(stuck: int) -> None:
    threads, gate, done = SharedThreads("stuck"), threading.Event(), threading.Event()
    blocked = [threads.open(lambda: gate.wait(LONG_S) and None) for _ in range(stuck)]
    other = threads.open(done.set)
    for task in (*blocked, other):
        task.call()
    assert done.wait(LONG_S)
    assert not gate.is_set()
    gate.set()
    for task in (*blocked, other):
        task.close()
    assert threads.join(LONG_S)


def test_a_call_alone_behind_a_stuck_task_is_done_too() -> None:
    threads, gate, done, begun = SharedThreads("alone"), threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        gate.wait(LONG_S)

    tasks = [threads.open(block), threads.open(done.set)]
    tasks[0].call()
    assert begun.wait(LONG_S)
    tasks[1].call()
    assert done.wait(LONG_S)
    gate.set()
    for task in tasks:
        task.close()
    assert threads.join(LONG_S)


def test_one_thread_does_the_tasks_of_threads_that_are_one() -> None:
    threads, doers = SharedThreads("one", 1), set[threading.Thread]()
    done = [threading.Event() for _ in range(4)]

    def work(number: int) -> None:
        doers.add(threading.current_thread())
        time.sleep(0.06)  # longer than others wait for another thread
        done[number].set()

    tasks = [threads.open(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
    for task in tasks:
        task.call()
    assert all(one.wait(LONG_S) for one in done)
    assert len(doers) == 1
    for task in tasks:
        task.close()
    assert threads.join(LONG_S)


def test_a_task_may_call_and_close_itself_and_threads_start_again() -> None:
    threads, runs = SharedThreads("itself"), list[int]()
    for _ in range(2):
        over, tasks = threading.Event(), list[SharedTask]()

        def work(over: threading.Event = over, tasks: list[SharedTask] = tasks) -> None:
            runs.append(1)
            if len(runs) % 5:
                tasks[0].call()
            else:
                tasks[0].close()
                over.set()

        tasks.append(threads.open(work))
        tasks[0].call()
        assert over.wait(LONG_S)
        assert threads.join(LONG_S)
    assert len(runs) == 10


def test_a_task_that_raises_is_logged_and_done_again(caplog: pytest.LogCaptureFixture) -> None:
    threads, over, runs = SharedThreads("raises"), threading.Event(), list[int]()

    def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("wrong")
        over.set()

    task = threads.open(work)
    task.call()
    deadline = time.monotonic() + LONG_S
    while not runs and time.monotonic() < deadline:
        time.sleep(0.001)
    task.call()
    assert over.wait(LONG_S)
    assert "wrong" in caplog.text
    task.close()
    assert threads.join(LONG_S)
