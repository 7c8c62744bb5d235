"""Reports an error as one line on standard error and an exit code, without a traceback."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable

from typer import TyperException

from saccade.pipeline.errors import ConfigError, RunFailed, StreamError, one_line

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130

_MOST_LINES = 100  # maximum number of stored warnings
_AGAIN_S = 60.0  # until a warning with the same text is shown again


class _Warnings(logging.Handler):
    """Collects logged warnings and errors for display. A message with the same text is shown at most once a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._waiting: deque[str] = deque(maxlen=_MOST_LINES)
        self._kept_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        line, now = one_line(record.getMessage()), time.monotonic()
        if now - self._kept_at.get(line, -_AGAIN_S) < _AGAIN_S:
            return
        self._kept_at.pop(line, None)  # reinserted below as the newest
        while len(self._kept_at) >= _MOST_LINES:
            del self._kept_at[next(iter(self._kept_at))]
        self._kept_at[line] = now
        self._waiting.append(line)

    def take(self) -> list[str]:
        """Return the warnings that have not been shown yet, one line each."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def forget(self) -> None:
        """Delete all collected warnings, so that the next command does not show them."""
        self._waiting.clear()
        self._kept_at.clear()


_warnings = _Warnings()


def take_warnings() -> list[str]:
    """Return the warnings that were logged since the last call, one line each."""
    return _warnings.take()


def guarded(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. On an error, print the error message as one line.

    Without an error, print the warnings that were not shown yet. With SACCADE_DEBUG=1, an error also prints the
    traceback.
    """
    _warnings.forget()
    logging.getLogger().addHandler(_warnings)
    try:
        code = command()
        for line in take_warnings():
            print(f"saccade: {line}", file=sys.stderr)
        return code
    except KeyboardInterrupt as interrupt:
        return int(interrupt.args[0]) if interrupt.args else INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output is gone (`saccade models | head`), so Python must not flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if os.environ.get("SACCADE_DEBUG") == "1":
            traceback.print_exc()
        message, code = _explain(error)
        print(f"saccade: {one_line(message)}", file=sys.stderr)
        return code
    finally:
        logging.getLogger().removeHandler(_warnings)


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, RunFailed):
        return _explain(error.__cause__)[0] if isinstance(error.__cause__, Exception) else str(error), FAILED
    if isinstance(error, TyperException):
        return error.format_message(), error.exit_code
    if isinstance(error, ConfigError):
        return str(error), BAD_INPUT
    if isinstance(error, StreamError):
        return str(error), FAILED
    if isinstance(error, ImportError):
        return f"{error}; `saccade doctor` shows what is missing", FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {error.filename or 'standard output'}: {error.strerror}", FAILED
    # Imported late, because these modules import torch and FFmpeg.
    from saccade.engine import EngineError
    from saccade.sinks import SinkError
    from saccade.sources import SourceError

    if isinstance(error, EngineError | SinkError | SourceError):
        return str(error), BAD_INPUT
    return f"internal error: {type(error).__name__}: {error}; SACCADE_DEBUG=1 shows where", FAILED
