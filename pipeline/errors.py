"""The pipeline's own errors, each with one line for the user as its message, and how any text becomes such a line.

Knows nothing of exit codes or terminals; imports nothing that is slow to import.
"""

from __future__ import annotations


class ConfigError(Exception):
    """A configuration that cannot be used; `str()` of it is one line that names the place and the problem."""


class NotKeptError(ConfigError):
    """A change that cannot be stored, and was not made: a fault of the disk, not of the change."""


class TextError(ConfigError):
    """A mistake in a text that a person has written; `str()` of it does not name the place.

    Args:
        reason: what is wrong, in half a line.
        line, column: where, both from 1; None if it is nowhere in particular.
    """

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        self.column = column


class StreamError(Exception):
    """A stream cannot be added, found or ended; `str()` of it is one line for the user."""


class AwayError(StreamError):
    """No worker has the stream, or is ready, at the moment: a client may try again in some seconds."""


class RunFailed(Exception):  # noqa: N818 - names how far it got, not a kind of error
    """A run that had started could not go on; the error it is raised from is the reason."""


def one_line(text: str) -> str:
    """`text` without line breaks, the user name and password of any address in it.

    A byte of a file's name that is not UTF-8 becomes an escape, as YAML and JSON have it.
    """
    from saccade.sources import redact  # only now, because it brings FFmpeg with it

    return redact(" ".join(text.split()).encode(errors="backslashreplace").decode())
