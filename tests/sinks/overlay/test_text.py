"""Texts that are rendered once and kept: how many."""

from __future__ import annotations

from saccade.sinks.overlay.text import label, note


def test_labels_without_end_take_bounded_memory() -> None:
    sizes = [
        (one.ink.nbytes + one.clear.nbytes) for one in (label(f"#{number}", (1, 2, 3), 33) for number in range(600))
    ]
    assert label.cache_info().currsize * max(sizes) < 16 << 20
    for number in range(200):
        note(f"{number}", 33)
    assert note.cache_info().currsize <= 64
