"""The exceptions of every source. Knows nothing of what raises them."""

from __future__ import annotations

from typing import Literal

Reason = Literal["connection failed", "auth failed", "tls", "timeout", "not found", "codec unsupported"]
"""Why a live source is not live."""


class SourceError(Exception):
    """A source cannot be used. The message is one line for the user: what is wrong and what to do about it."""


class LiveError(SourceError):
    """A live source failed. The message is one line.

    Attributes:
        reason: its code.
        message: what the line says behind the code.
        refused: whether the server refused the user name and password given, so that trying again may lock the account.
    """

    def __init__(self, reason: Reason, message: str, *, refused: bool = False) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason: Reason = reason
        self.message = message
        self.refused = refused


class StreamEndedError(Exception):
    """The connection delivered a stream of limited length, which is over: nothing to reconnect to."""
