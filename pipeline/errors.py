"""Exceptions of the pipeline. Every message is a single line for the user."""

from __future__ import annotations


class ConfigError(Exception):
    """Raised if a configuration cannot be used. The message is one line that names the setting and the problem."""


class NotKeptError(ConfigError):
    """Raised if a valid configuration change is rejected because writing it to disk failed."""


class TextError(ConfigError):
    """Raised if text that the user entered is invalid.

    Args:
        reason: short description of the error, without its position.
        line, column: position of the error in the text, counted from 1, or None.
    """

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        self.column = column


class StreamError(Exception):
    """Raised if a stream cannot be added, found or stopped. The message is one line for the user."""


class AwayError(StreamError):
    """Raised if no worker is ready for a stream, or if the worker of a stream does not respond.

    A client can retry after a few seconds.
    """


class RunFailed(Exception):  # noqa: N818 - names how far it got, not a kind of error
    """Raised if a run fails after its start. `__cause__` is the original exception."""


def one_line(text: str) -> str:
    """Return the text as one line, without credentials in URLs and without invalid UTF-8."""
    from saccade.sources import redact  # imported late, because it imports FFmpeg

    return redact(" ".join(text.split()).encode(errors="backslashreplace").decode())


def reason_of(error: BaseException) -> str:
    """Return the message of an exception as one line, or the name of its class if it has no message."""
    return one_line(str(error)) or type(error).__name__
