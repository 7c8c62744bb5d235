"""Queue of encoded frames between the network and the decoder, with limited waiting time and size. Not thread-safe."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from saccade.sources.rtp.depacketizer import AccessUnit

MAX_AGE_S = 1.0
CATCH_UP_S = 0.5  # longest time to decode a backlog; a longer one would be a second late before it is decoded
MAX_BYTES = 64 << 20  # 5 s of 100 Mbit/s
_FIRST_DECODE_S = 0.01  # assumed before the first frame: 4K on one core


class CodedQueue:
    """Queue of encoded access units (frames). If decoding is too slow, the queue drops old access units.

    Decoding then continues at the newest keyframe in the queue, or waits for the next keyframe.
    """

    def __init__(self) -> None:
        self._units: deque[AccessUnit] = deque()
        self._bytes = 0
        self._needs_key = False
        self._lost = 0  # since the last `pop`
        self._decode_s = _FIRST_DECODE_S
        self.dropped = 0
        """Number of access units dropped because the decoder was too slow."""

    def __len__(self) -> int:
        return len(self._units)

    @property
    def needs_key(self) -> bool:
        """Whether the queue drops all access units until the next keyframe."""
        return self._needs_key

    def age(self, now: float) -> float:
        """Return for how many seconds the oldest access unit has waited at time `now`; 0 if the queue is empty."""
        return now - self._units[0].arrived_at if self._units else 0.0

    def push(self, unit: AccessUnit, now: float) -> None:
        """Append an access unit at time `now` in seconds. Drop old access units if decoding is too slow."""
        if self._needs_key and not unit.key:
            self._count(unit.dropped_before + 1)
            return
        if self._needs_key:
            self._needs_key, unit = False, replace(unit, fresh=True)
        self._units.append(unit)
        self._bytes += len(unit.data)
        self._bound(now)

    def pop(self, now: float) -> AccessUnit | None:
        """Remove and return the oldest access unit, or return None if the queue is empty.

        Access units that have waited too long are dropped first. The returned `dropped_before` counts them.

        Args:
            now: current time in seconds.
        """
        self._bound(now)
        if not self._units:
            return None
        unit = self._units.popleft()
        self._bytes -= len(unit.data)
        lost, self._lost = self._lost, 0
        return replace(unit, dropped_before=unit.dropped_before + lost) if lost else unit

    def note_decode(self, seconds: float) -> None:
        """Record how long the last access unit took to decode, in seconds."""
        self._decode_s += 0.1 * (seconds - self._decode_s)

    def need_key(self) -> None:
        """Drop all access units before the next keyframe. Call this if the decoder failed to decode an access unit."""
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
