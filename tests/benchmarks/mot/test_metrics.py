"""MOTA, IDF1 and HOTA of cases small enough to be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.mot.files import Rows
from benchmarks.mot.metrics import Counts, count


def track(number: int, x: float, frames: range = range(1, 11), width: float = 100) -> Rows:
    """A track that stands still."""
    rows = [(frame, number, x, 0, x + width, 100, 1, 1) for frame in frames]
    return np.array(rows, np.float64).reshape(-1, 8)


def together(*tracks: Rows) -> Rows:
    return np.concatenate(tracks) if tracks else np.zeros((0, 8))


ONE, TWO = track(1, 0), track(2, 500)
FIRST, SECOND = range(1, 6), range(6, 11)

CASES = {
    "all right": (together(ONE, TWO), together(track(7, 0), track(8, 500)), (1, 1, 1), 0),
    "nothing found": (ONE, together(), (0, 0, 0), 0),
    "nothing to find": (together(), ONE, (-9, 0, 0), 0),
    "nothing at all": (together(), together(), (1, 0, 0), 0),
    # Each half of the object's ten boxes is with a track of five: 5 / (10 + 5 - 5).
    "a new number halfway": (ONE, together(track(1, 0, FIRST), track(2, 0, SECOND)), (0.9, 0.5, 0.5**0.5), 1),
    # Found 10 of 20, and 10 that are nothing: detection 10 / (20 + 20 - 10).
    "one missed, one false": (together(ONE, TWO), together(track(1, 0), track(3, 900)), (0, 0.5, (1 / 3) ** 0.5), 0),
    # Each pair is together in 5 of 15 boxes.
    "two swap their numbers": (
        together(ONE, TWO),
        together(track(1, 0, FIRST), track(2, 0, SECOND), track(2, 500, FIRST), track(1, 500, SECOND)),
        (0.9, 0.5, (5 / 15) ** 0.5),
        2,
    ),
    # Found at 0.62 of overlap: at 12 of HOTA's 19 thresholds.
    "boxes too narrow": (ONE, track(1, 0, width=62), (1, 1, 12 / 19), 0),
    "boxes far too narrow": (ONE, track(1, 0, width=42), (-1, 0, 8 / 19), 0),
    # A gap is no switch where the number comes back.
    "a gap": (ONE, together(track(4, 0, FIRST), track(4, 0, range(8, 11))), (0.8, 16 / 18, 0.8), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_counted_by_hand(case: str) -> None:
    truth, found, (mota, idf1, hota), switches = CASES[case]
    counts = count(truth, found)
    assert (counts.mota, counts.idf1, counts.hota) == (pytest.approx(mota), pytest.approx(idf1), pytest.approx(hota))
    assert counts.switches == switches


def test_the_names_of_tracks_do_not_matter() -> None:
    truth, found, _, _ = CASES["two swap their numbers"]
    renamed = found.copy()
    renamed[:, 1] = 1000 - 7 * found[:, 1]
    assert count(truth, renamed[::-1]).to_dict() == count(truth, found).to_dict()


def test_counts_of_sequences_add_up() -> None:
    parts = [count(*CASES[case][:2]) for case in ("a new number halfway", "all right")]
    whole = sum(parts, Counts())
    assert (whole.truth, whole.switches, whole.mota) == (30, 1, pytest.approx(29 / 30))
    assert whole.idf1 == pytest.approx(2 * 25 / 60)
    assert whole.hota == pytest.approx(((10 * 0.5 + 20) / 30) ** 0.5)


def test_what_is_found_on_a_distractor_counts_neither_way() -> None:
    found = together(track(1, 0), track(2, 500), track(3, 900))
    counts = count(ONE, found, distractors=TWO)
    assert (counts.found, counts.matched, counts.mota) == (20, 10, pytest.approx(0))
