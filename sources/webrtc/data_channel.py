"""Short texts to and from one WebRTC peer, over a data channel that the peer opens.

What goes out is of interest only while it is new: where the peer is slow, the newest text takes the place of the one
that still waits. Knows nothing of what the texts say, nor of models, results or sinks.
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
"""What the peer calls its channel; others are closed."""

MAX_TEXT = 4096  # characters of a text that comes in
_REPLIES = 256 * 1024  # bytes that may wait: a peer that asks and asks but never reads gets no more answers


class Messages:
    """The channel of one peer; made on the event loop of its connection. Without a channel, texts go nowhere.

    Attributes:
        answer: called on the event loop with each text that comes; must return at once. What it returns goes back.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._newest: deque[str] = deque(maxlen=1)  # put in and taken out in one step each, since threads do both
        self.answer: Callable[[str], str | None] = lambda text: None

    @property
    def open(self) -> bool:
        """Whether the peer has opened its channel."""
        return self._channel is not None and self._channel.readyState == "open"

    def listen(self, connection: Any) -> None:
        """Take the channel that the peer of an aiortc connection opens."""
        self._loop = asyncio.get_running_loop()

        connection.on("datachannel", self._opened)

    def send(self, text: str) -> None:
        """Send `text`, unless a newer one comes before its turn. Callable from any thread; returns at once."""
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
                self._say(self._newest.pop())

    def _take(self, text: str | bytes) -> None:
        if isinstance(text, bytes) or len(text) > MAX_TEXT:
            log.debug("a message was too long, or no text")
            return
        answer = self.answer(text)
        if answer is not None and self.open and self._channel.bufferedAmount < _REPLIES:
            self._say(answer)

    def _say(self, text: str) -> None:
        with suppress(ValueError):  # longer than the peer said it can take
            self._channel.send(text)
