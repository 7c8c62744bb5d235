"""A small thread pool that serves many streams. Usually, only one of its threads runs tasks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

_LATE_S = 0.05  # a task that waits longer gets another thread: the others are stuck or overloaded
_MOST = 16


class SharedThreads:
    """A pool of daemon threads that run tasks. The threads end after the last task is closed.

    Usually one thread runs all tasks. A further thread is started if a task has waited for a thread for 50 ms.

    Args:
        name: name of the threads.
        most: maximum number of threads.
    """

    def __init__(self, name: str, most: int = _MOST) -> None:
        self._name, self._most = name, most
        self._changed = threading.Condition()
        self._called: deque[SharedTask] = deque()
        self._threads: set[threading.Thread] = set()
        self._tasks = self._idle = self._busy = 0
        self._watching = False  # whether an idle thread looks for tasks that wait too long
        self._waking = False

    def open(self, work: Callable[[], None]) -> SharedTask:
        """Add a task to the pool. The caller closes the task.

        Args:
            work: function of the task. `SharedTask.call` requests a call. Calls never overlap.

        Raises:
            RuntimeError: if no thread can be started.
        """
        with self._changed:
            if not self._threads:
                self._start()
            self._tasks += 1
        return SharedTask(self, work)

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the threads to end. Return whether they have ended.

        The threads end after the last task is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)
            raise

    def _call(self, task: SharedTask) -> None:
        with self._changed:
            if not task.called:
                task.called = True
                if not task.running:  # a running task is queued again by its own thread
                    self._queue(task)

    def _queue(self, task: SharedTask) -> None:
        task.called_at = time.monotonic()
        self._called.append(task)
        if self._idle and not self._waking and not (self._busy and self._watching):
            self._waking = True
            self._changed.notify()

    def _close(self) -> None:
        with self._changed:
            self._tasks -= 1
            if not self._tasks:
                self._changed.notify_all()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.work()
            except Exception:
                log.exception("thread pool %s: a task failed", self._name)
            with self._changed:
                self._busy -= 1
                task.running = False
                if task.called:
                    self._queue(task)
            del task  # the variable would keep the stream in memory until the next task

    def _next(self) -> SharedTask | None:
        """Wait for the next task and return it. Return None if this thread should end."""
        with self._changed:
            while not self._may_take:
                if not self._tasks or self._idle > 1:
                    self._threads.remove(threading.current_thread())
                    return None
                self._idle += 1
                watches = self._busy > 0 and not self._watching
                self._watching = self._watching or watches
                self._changed.wait(_LATE_S if watches else None)
                self._watching = self._watching and not watches
                self._idle -= 1
                self._waking = False
            task = self._called.popleft()
            task.called, task.running = False, True
            self._busy += 1
            if not self._idle and len(self._threads) < self._most:
                with suppress(RuntimeError):  # no new thread could be started; continue with the existing threads
                    self._start()
            return task

    @property
    def _may_take(self) -> bool:
        return bool(self._called) and (not self._busy or time.monotonic() - self._called[0].called_at > _LATE_S)


class SharedTask:
    """A task of the thread pool `SharedThreads`. `SharedThreads.open` creates it."""

    __slots__ = ("_threads", "called", "called_at", "running", "work")

    def __init__(self, threads: SharedThreads, work: Callable[[], None]) -> None:
        self._threads, self.work = threads, work
        self.called = self.running = False
        self.called_at = 0.0

    def call(self) -> None:
        """Request that a thread of the pool calls the task's function. Returns without waiting. Thread-safe."""
        self._threads._call(self)

    def close(self) -> None:
        """Close the task. The threads of the pool end after the last task is closed."""
        self._threads._close()
