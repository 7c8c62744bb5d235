"""Coded frames between the network and the decoder, bounded in age and memory, whatever falls behind.

Pure: the caller passes the time, and guards it where threads share it. Knows nothing of sockets, threads or codecs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from saccade.sources.rtp.depacketizer import AccessUnit

MAX_AGE_S = 1.0
CATCH_UP_S = 0.5  # what decoding a backlog may take; with more it would not catch up before it is a second late
MAX_BYTES = 64 << 20  # 5 s of 100 Mbit/s
_FIRST_DECODE_S = 0.01  # assumed before the first frame: 4K on one core


class CodedQueue:
    """Access units in order. Those that the decoder would be late with are dropped up to a key frame, and counted.

    Behind by more than `MAX_AGE_S`, everything before the newest key frame goes; if there is none, or what follows it
    takes longer than `CATCH_UP_S` to decode, everything does, and nothing is taken in before the next key frame.
    """

    def __init__(self) -> None:
        self._units: deque[AccessUnit] = deque()
        self._bytes = 0
        self._needs_key = False
        self._lost = 0  # since the last unit handed out
        self._decode_s = _FIRST_DECODE_S
        self.dropped = 0
        """Units dropped because decoding was behind."""

    def __len__(self) -> int:
        return len(self._units)

    @property
    def needs_key(self) -> bool:
        """Whether nothing is taken in before the next key frame."""
        return self._needs_key

    def age(self, now: float) -> float:
        """How long the oldest unit has been waiting at `now`, in seconds; 0 when there is none."""
        return now - self._units[0].arrived_at if self._units else 0.0

    def push(self, unit: AccessUnit, now: float) -> None:
        """Take a unit in, at `now` seconds."""
        if self._needs_key and not unit.key:
            self._count(unit.dropped_before + 1)
            return
        if self._needs_key:
            self._needs_key, unit = False, replace(unit, fresh=True)
        self._units.append(unit)
        self._bytes += len(unit.data)
        self._bound(now)

    def pop(self, now: float) -> AccessUnit | None:
        """The oldest unit that is still worth decoding; None if there is none. `dropped_before` counts all losses."""
        self._bound(now)
        if not self._units:
            return None
        unit = self._units.popleft()
        self._bytes -= len(unit.data)
        lost, self._lost = self._lost, 0
        return replace(unit, dropped_before=unit.dropped_before + lost) if lost else unit

    def note_decode(self, seconds: float) -> None:
        """Take note of how long the last unit took to decode."""
        self._decode_s += 0.1 * (seconds - self._decode_s)

    def need_key(self) -> None:
        """Drop everything before the next key frame: the decoder could not use the last unit."""
        while self._units and not self._units[0].key:
            self._drop()
        self._needs_key = not self._units
        if self._units:
            self._units[0] = replace(self._units[0], fresh=True)

    def _bound(self, now: float) -> None:
        if self.age(now) <= MAX_AGE_S and self._bytes <= MAX_BYTES:
            return
        newest_key = next((at for at in range(len(self._units) - 1, 0, -1) if self._units[at].key), 0)
        for _ in range(newest_key):
            self._drop()
        if newest_key:
            self._units[0] = replace(self._units[0], fresh=True)
        too_old = self.age(now) > MAX_AGE_S and len(self._units) * self._decode_s > CATCH_UP_S
        if too_old or self._bytes > MAX_BYTES:
            self._needs_key = True
            while self._units:
                self._drop()

    def _drop(self) -> None:
        unit = self._units.popleft()
        self._bytes -= len(unit.data)
        self._count(unit.dropped_before + 1)

    def _count(self, lost: int) -> None:
        self._lost += lost
        self.dropped += 1
