"""Short text messages to and from a WebRTC peer, over a data channel that the peer opens.

If the peer receives slowly, a newer outgoing message replaces an unsent message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

LABEL = "results"
"""Label of the channel; channels with another label are closed."""

MAX_TEXT = 4096  # characters of an incoming text
_REPLIES = 256 * 1024  # bytes queued: a peer that never reads gets no more replies


class Messages:
    """Text messages over the data channel of one WebRTC peer. Without an open channel, messages are discarded.

    Attributes:
        answer: function that is called on the event loop with each incoming text, and returns the reply or None. Must
            not block.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._newest: deque[str] = deque(maxlen=1)  # append and pop are atomic, since threads do both
        self.answer: Callable[[str], str | None] = lambda text: None

    @property
    def open(self) -> bool:
        """Whether the peer has opened its data channel."""
        return self._channel is not None and self._channel.readyState == "open"

    def listen(self, connection: Any) -> None:
        """Accept the data channel that the peer opens on an aiortc connection."""
        self._loop = asyncio.get_running_loop()

        connection.on("datachannel", self._opened)

    def send(self, text: str) -> None:
        """Queue a text for sending. It replaces a queued text that was not sent yet. Thread-safe; does not block."""
        self._newest.append(text)
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and the peer with it
                self._loop.call_soon_threadsafe(self._send)

    def _opened(self, channel: Any) -> None:
        if channel.label != LABEL or self.open:
            channel.close()
            return
        self._channel = channel
        channel.on("message", self._take)
        channel.on("bufferedamountlow", self._send)
        self._send()

    def _send(self) -> None:
        if self.open and self._channel.bufferedAmount == 0:
            with suppress(IndexError):
                self._send_now(self._newest.pop())

    def _take(self, text: str | bytes) -> None:
        if isinstance(text, bytes) or len(text) > MAX_TEXT:
            log.debug("ignored a message that was too long or not text")
            return
        answer = self.answer(text)
        if answer is not None and self.open and self._channel.bufferedAmount < _REPLIES:
            self._send_now(answer)

    def _send_now(self, text: str) -> None:
        with suppress(ValueError):  # longer than the peer's maximum message size
            self._channel.send(text)
