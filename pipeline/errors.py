"""The errors of the pipeline, each with a message of one line, and a function that makes such lines."""

from __future__ import annotations


class ConfigError(Exception):
    """A configuration cannot be used; the message is one line that names the place and the problem."""


class NotKeptError(ConfigError):
    """A change was not made, because it could not be stored; the fault lies with the disk, not with the change."""


class TextError(ConfigError):
    """A mistake in a text written by the user; the message does not name the place.

    Args:
        reason: short text of the mistake.
        line, column: place of the mistake, both from 1, or None.
    """

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        self.column = column


class StreamError(Exception):
    """A stream cannot be added, found or stopped; the message is one line for the user."""


class AwayError(StreamError):
    """No worker is ready for the stream at the moment; a client may retry after some seconds."""


class RunFailed(Exception):  # noqa: N818 - names how far it got, not a kind of error
    """A run failed after it had started; the cause is the exception's `__cause__`."""


def one_line(text: str) -> str:
    """Return the text without line breaks and without credentials in addresses.

    A byte of a file name that is not UTF-8 is replaced by an escape, as in YAML and JSON.
    """
    from saccade.sources import redact  # imported late, because it imports FFmpeg

    return redact(" ".join(text.split()).encode(errors="backslashreplace").decode())
