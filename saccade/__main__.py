"""The command `saccade`, also as `python -m saccade`: ends quietly on Ctrl-C while its modules are imported.

Knows nothing of commands and imports nothing else of the project before that is in place.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs have it ignored
        signal.signal(signal.SIGINT, _interrupt)
    from saccade.pipeline.cli.main import main as run_command_line

    run_command_line()


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but within an import exit at once.

    What is imported would turn the exception into another (pydantic, aiortc) or abort (torch, in C++); and it comes as
    a traceback where no command catches it yet.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
