"""Exceptions that video sources raise."""

from __future__ import annotations

from typing import Literal

Reason = Literal["connection failed", "auth failed", "tls", "timeout", "not found", "codec unsupported"]
"""Category of the failure for which a live source is not connected."""


class SourceError(Exception):
    """Raised if a source cannot be used. The one-line message tells the user what is wrong and what to do."""


class LiveError(SourceError):
    """Raised if a live source fails, for example a camera. The message is one line for the user.

    Attributes:
        reason: category of the failure, such as "timeout".
        message: description of the failure without the category.
        refused: whether the server rejected the credentials. Further attempts may then lock the account.
    """

    def __init__(self, reason: Reason, message: str, *, refused: bool = False) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason: Reason = reason
        self.message = message
        self.refused = refused


class StreamEndedError(Exception):
    """Raised when a live stream of limited length has ended. The source then does not reconnect."""
