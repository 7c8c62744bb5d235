"""Parts of pinned memory: in line where they can be, never one in another's place, and free again in any order."""

from __future__ import annotations

import random

import numpy as np

from saccade.engine.runtime.uploads import PinnedMemory, PinnedPart


def test_parts_are_never_in_each_others_place() -> None:
    dice, memory = random.Random(3), PinnedMemory(1 << 14)
    held: list[tuple[PinnedPart, int]] = []
    refused = 0
    for number in range(4000):
        if held and dice.random() < 0.5:
            held.pop(dice.randrange(min(4, len(held))))
        part = memory.take(count := dice.choice([1, 200, 256, 700, 3000]))
        if part is None:
            refused += 1
            continue
        assert part.end - part.start >= count
        assert all(part.end <= other.start or other.end <= part.start for other, _ in held)
        memory.array(part, count).fill(number % 251)
        held.append((part, number % 251))
        for other, value in held:
            assert memory.tensor(other.start, other.start + 1).item() == value
    assert 0 < refused < 2000


def test_what_comes_in_order_lies_in_line() -> None:
    memory = PinnedMemory(1 << 12)
    parts = [memory.take(1000) for _ in range(4)]
    assert [part and part.start for part in parts] == [0, 1024, 2048, 3072]
    assert memory.take(1) is None
    del parts[0], parts[0]
    again = [memory.take(2000), memory.take(1)]
    assert [part and part.start for part in again] == [0, None]
    parts.clear()
    again.clear()
    whole = memory.take(1 << 12)
    assert whole is not None
    assert np.shares_memory(memory.array(whole, 1 << 12), memory.tensor(0, 1).numpy())
    del whole
    assert memory.take((1 << 12) + 1) is None
