"""Incremental detokenization: text is released as soon as no later token can change it. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a character decodes to while some of its bytes are missing


class Detokenizer:
    """Text that grows with each token, and ends before the first stop string.

    Which stop string is the first does not depend on where tokens begin: it is the one that is complete first, and of
    those the longest.

    Args:
        decode: text of token ids.
        stop: strings that end the text.
        on_text: called with each piece as soon as it is final, none of them empty; joined they are `text`.
    """

    __slots__ = ("_decode", "_from", "_held", "_on_text", "_pieces", "_read", "_shown", "_stop", "_tokens")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._decode, self._stop, self._on_text = decode, tuple(stop), on_text
        self._tokens: list[int] = []
        # Tokens are decoded with those of the piece before, since some decoders join words by what is between them.
        self._from = self._read = 0
        self._shown = ""  # text of tokens[_from:_read]
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that has been released."""
        return "".join(self._pieces)

    def add(self, token: int) -> bool:
        """Take a token; True when a stop string is complete."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._from :])
        if text.endswith(_INCOMPLETE):
            return False
        return self._take(text)

    def end(self) -> None:
        """Release what was held back: nothing more comes. A second call, or one after a stop string, does nothing."""
        if self._read < len(self._tokens):
            self._take(self._decode(self._tokens[self._from :]))
        self._emit(len(self._held))

    def _take(self, text: str) -> bool:
        self._held += text[len(self._shown) :]
        self._from, self._read = self._read, len(self._tokens)
        self._shown = self._decode(self._tokens[self._from :])
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self._emit(min(found)[1])
            self._held = ""
            return True
        self._emit(len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0))
        return False

    def _emit(self, count: int) -> None:
        piece, self._held = self._held[:count], self._held[count:]
        if piece:
            self._pieces.append(piece)
            if self._on_text is not None:
                self._on_text(piece)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop string begins with, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
