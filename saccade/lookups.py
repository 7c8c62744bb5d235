"""Resolves host names in daemon threads, because the system's resolver can block for minutes."""

# At exit, Python waits for asyncio's executor threads, but not for daemon threads.

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Addresses = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]
"""What `socket.getaddrinfo` returns."""

LOOKUP_S = 5.0
_WAKE_S = 0.1
_FRESH_S = 60.0  # for which an answer is kept that came after whoever asked had given up


class _Lookup:
    """A DNS lookup of one host name, in progress or finished."""

    def __init__(self, host: str, port: int | None) -> None:
        self.done = threading.Event()
        self.ended_at = 0.0
        self.found: Addresses = ()
        self.error: Exception | None = None
        threading.Thread(target=self._work, args=(host, port), name="saccade lookup", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether the result of the lookup can be used: the lookup is still in progress, or has ended recently."""
        return not self.done.is_set() or time.monotonic() - self.ended_at < _FRESH_S

    def _work(self, host: str, port: int | None) -> None:
        try:
            self.found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:
            self.error = error
        self.ended_at = time.monotonic()
        self.done.set()


_lock = threading.Lock()
_pending: dict[tuple[str, int | None], _Lookup] = {}  # guarded by the lock; one thread a name


def look_up(
    host: str, port: int | None = None, *, limit_s: float = LOOKUP_S, cancelled: threading.Event | None = None
) -> Addresses:
    """Resolve a host for TCP, with a timeout. The result has the format of `socket.getaddrinfo`.

    After a timeout, the lookup continues in the background for later calls with the same host.

    Args:
        host: host name or IP address.
        port: port for the addresses.
        limit_s: timeout in seconds.
        cancelled: `threading.Event` that stops the wait.

    Raises:
        TimeoutError: after the timeout, or if `cancelled` is set.
        OSError, UnicodeError: see `socket.getaddrinfo`.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # no resolver is asked
    key = host, port
    with _lock:
        lookup = _pending.get(key)
        if lookup is None or not lookup.usable:
            lookup = _pending[key] = _Lookup(host, port)
    deadline = time.monotonic() + limit_s
    while not lookup.done.wait(min(_WAKE_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline or (cancelled is not None and cancelled.is_set()):
            raise TimeoutError(f"resolving {host} takes longer than {limit_s:g} s; check the DNS server")
    with _lock:
        if _pending.get(key) is lookup:
            del _pending[key]
    if lookup.error is not None:
        raise lookup.error
    return lookup.found


class DaemonLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop that runs blocking calls, such as name lookups, in daemon threads."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function in the given executor, or in a new daemon thread if the executor is None."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        future: asyncio.Future[T] = self.create_future()

        def settle(outcome: Callable[[], object]) -> None:
            if not future.done():
                outcome()

        def work() -> None:
            try:
                outcome: Callable[[], object] = partial(future.set_result, func(*args))
            except BaseException as error:
                outcome = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                self.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=work, name="saccade call", daemon=True).start()
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, but without waiting for unfinished name lookups and other blocking calls."""
    with asyncio.Runner(loop_factory=DaemonLoop) as runner:
        return runner.run(main)
