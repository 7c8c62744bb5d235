"""Handles SIGINT, SIGTERM and SIGHUP during a command, as requests for a shutdown or a reload."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Self

from saccade.pipeline.cli.error_report import INTERRUPTED

LIMIT_S = 4.7  # from SIGTERM, SIGHUP or a second SIGINT to the exit of the process; the documented limit is 5 s
_POLL_S = 0.1
_EXIT_CODE = 1

_CAUGHT = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class EndingSignals:
    """Records the signals that stop a command, from `catch` to the end of the `with` block.

    The first SIGINT (Ctrl-C) requests a shutdown without a timeout. After SIGTERM or a second SIGINT, the process exits
    within 5 s, even if a thread hangs.
    """

    def __init__(self) -> None:
        self._reload: bool | None = None  # whether a reload was requested; None if SIGHUP stops the command
        self._caught: list[tuple[int, float]] = []  # signal number and time.monotonic()
        self._previous: dict[int, signal.Handlers | object] = {}
        self._done = threading.Event()

    def reload_on_hangup(self) -> None:
        """Use SIGHUP as a request to reload the configuration. Without this call, SIGHUP stops the command."""
        self._reload = False

    def take_reload(self) -> bool:
        """Return whether a reload was requested since the last call."""
        asked = self._reload is True
        if asked:
            self._reload = False
        return asked

    def catch(self) -> None:
        """Start to record signals. Before this call, a signal ends the process at once.

        A second call does nothing.
        """
        if self._previous:
            return
        for number in _CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
                self._previous[number] = signal.signal(number, self._note)
        threading.Thread(target=self._watch, name="ending signals", daemon=True).start()

    def __bool__(self) -> bool:
        """Return whether a signal was received."""
        return bool(self._caught)

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 without a signal or after SIGTERM, otherwise 130."""
        # SIGTERM is a success, because service managers use it for a regular shutdown.
        return INTERRUPTED if self._caught and self._caught[0][0] != signal.SIGTERM else 0

    @property
    def urgent_at(self) -> float | None:
        """The time of the first signal that limits the shutdown to 5 s, by `time.monotonic()`, or None.

        These signals are SIGTERM, a second SIGINT, and SIGHUP unless it reloads the configuration.
        """
        urgent = [at for number, at in self._caught if number != signal.SIGINT] + [at for _, at in self._caught[1:]]
        return min(urgent, default=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous signal handlers."""
        if self.urgent_at is None:
            self._done.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        # A signal handler can interrupt the main thread at any point, so taking a lock could cause a deadlock.
        if self._reload is not None and number == getattr(signal, "SIGHUP", None):
            self._reload = True
            return
        self._caught.append((number, time.monotonic()))

    def _watch(self) -> None:
        """Exit the process if the shutdown takes longer than `LIMIT_S` seconds after a signal."""
        while not self._done.wait(_POLL_S):
            urgent_at = self.urgent_at
            if urgent_at is not None and time.monotonic() > urgent_at + LIMIT_S:
                print(
                    "saccade: forced exit, because closing took longer than 5 s after the signal",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(_EXIT_CODE)
