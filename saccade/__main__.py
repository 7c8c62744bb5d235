"""The command `saccade`, also as `python -m saccade`. A signal ends it quietly from the first moment on.

Handlers are set before anything slow is imported: as a container's first process (PID 1) a command without a handler
never sees SIGTERM, and `docker stop` would wait for its whole grace period. Knows nothing of commands.
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
    """Run the command line and exit."""
    for number in (getattr(signal, name) for name in _ENDING if hasattr(signal, name)):
        # A shell's background jobs have SIGINT ignored, and `nohup` has SIGHUP ignored: leave those.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)
    from saccade.pipeline.cli.main import main as run_command_line

    run_command_line()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt with the exit code, but within an import exit at once.

    The code is 0 where SIGTERM ends a command that lasts, so that service managers count no failure while it starts.

    What is imported would turn the exception into another (pydantic, aiortc) or abort (torch, in C++); and it comes as
    a traceback where no command catches it yet.
    """
    code = 0 if number == signal.SIGTERM and set(sys.argv[1:2]) & _SERVICES else INTERRUPTED
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(code)
        frame = frame.f_back
    raise KeyboardInterrupt(code)


if __name__ == "__main__":
    main()
