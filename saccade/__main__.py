"""The command `saccade`, also available as `python -m saccade`.

Signal handlers are installed before slow imports. Without a handler, the first process of a container (PID 1) ignores
SIGTERM, and `docker stop` waits for its whole grace period.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
_SERVICES = {"demo", "run"}  # commands that last until they are ended
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


def main() -> None:
    """Run the command line of Saccade and exit with its exit code."""
    for number in (getattr(signal, name) for name in _ENDING if hasattr(signal, name)):
        # A shell's background jobs have SIGINT ignored, and `nohup` has SIGHUP ignored: leave those.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)
    from saccade.pipeline.cli.main import main as run_command_line

    run_command_line()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise KeyboardInterrupt with the exit code, or exit immediately during an import."""
    # SIGTERM stops a service with exit code 0, so that service managers report no failure. During an import, pydantic
    # or aiortc would replace an exception, and torch would abort.
    code = 0 if number == signal.SIGTERM and set(sys.argv[1:2]) & _SERVICES else INTERRUPTED
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(code)
        frame = frame.f_back
    raise KeyboardInterrupt(code)


if __name__ == "__main__":
    main()
