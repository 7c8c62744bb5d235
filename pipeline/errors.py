"""The errors of the pipeline. Each message is one line, which `one_line` can create."""

from __future__ import annotations


class ConfigError(Exception):
    """Raised if a configuration cannot be used. The message is one line that names the setting and the problem."""


class NotKeptError(ConfigError):
    """Raised if a valid change was not made, because it could not be stored on disk."""


class TextError(ConfigError):
    """Raised if a text from the user is invalid. The message does not include the position.

    Args:
        reason: short description of the error.
        line, column: position of the error, both from 1, or None.
    """

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        self.column = column


class StreamError(Exception):
    """Raised if a stream cannot be added, found or stopped. The message is one line for the user."""


class AwayError(StreamError):
    """Raised if no worker is ready for a stream now. A client can retry after some seconds."""


class RunFailed(Exception):  # noqa: N818 - names how far it got, not a kind of error
    """Raised if a run fails after its start. `__cause__` is the original exception."""


def one_line(text: str) -> str:
    """Return the text as one line, with credentials removed from addresses.

    In file names, a byte that is not UTF-8 is replaced by an escape sequence, as in YAML and JSON.
    """
    from saccade.sources import redact  # imported late, because it imports FFmpeg

    return redact(" ".join(text.split()).encode(errors="backslashreplace").decode())
