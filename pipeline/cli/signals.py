"""SIGINT, SIGTERM and SIGHUP during a command: they are collected while files are closed, and have a time limit.

Knows nothing of streams. Handlers only note the signal: they interrupt the main thread anywhere, so taking a lock in
one could block for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Self

from saccade.pipeline.cli.error_report import INTERRUPTED

LIMIT_S = 4.7  # from SIGTERM, SIGHUP or a second SIGINT to the end of the process, whatever hangs; promised are 5 s
_POLL_S = 0.1
_EXIT_CODE = 1

_CAUGHT = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class EndingSignals:
    """Collects the signals that end a command, from `catch` to the end of its block.

    A first SIGINT only asks for the end, since a person who presses Ctrl-C can press it again. Any other signal is
    urgent: the process exits within 5 s, even if a part of it hangs.
    """

    def __init__(self) -> None:
        self._reload: bool | None = None  # whether it was asked for; None where SIGHUP ends the command
        self._caught: list[tuple[int, float]] = []  # number, and when by time.monotonic()
        self._previous: dict[int, signal.Handlers | object] = {}
        self._done = threading.Event()

    def reload_on_hangup(self) -> None:
        """From now on SIGHUP asks for the configuration to be read anew, and does not end the command."""
        self._reload = False

    def take_reload(self) -> bool:
        """Whether that was asked for since the last call."""
        asked = self._reload is True
        if asked:
            self._reload = False
        return asked

    def catch(self) -> None:
        """Collect signals from now on; before, they end the process at once. A second call does nothing."""
        if self._previous:
            return
        for number in _CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` has SIGHUP ignored
                self._previous[number] = signal.signal(number, self._note)
        threading.Thread(target=self._watch, name="ending signals", daemon=True).start()

    def __bool__(self) -> bool:
        """Whether a signal came."""
        return bool(self._caught)

    @property
    def exit_code(self) -> int:
        """0 after SIGTERM, by which service managers ask for an orderly end, and without a signal; else 130."""
        return INTERRUPTED if self._caught and self._caught[0][0] != signal.SIGTERM else 0

    @property
    def urgent_at(self) -> float | None:
        """`time.monotonic()` of the first urgent signal; None without one."""
        urgent = [at for number, at in self._caught if number != signal.SIGINT] + [at for _, at in self._caught[1:]]
        return min(urgent, default=None)

    def __enter__(self) -> Self:
        """Return the signals; none are caught yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let signals do again what they did before; the limit of an urgent one holds to the end of the process."""
        if self.urgent_at is None:
            self._done.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._reload is not None and number == getattr(signal, "SIGHUP", None):
            self._reload = True
            return
        self._caught.append((number, time.monotonic()))

    def _watch(self) -> None:
        """Exit when the limit has passed; in a thread, since the main thread may be what hangs."""
        while not self._done.wait(_POLL_S):
            urgent_at = self.urgent_at
            if urgent_at is not None and time.monotonic() > urgent_at + LIMIT_S:
                print("saccade: not everything could be closed within 5 s of the signal", file=sys.stderr, flush=True)
                os._exit(_EXIT_CODE)
