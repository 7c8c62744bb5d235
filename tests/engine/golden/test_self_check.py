"""A device is held to the CPU by what the embedded model finds on both."""

from __future__ import annotations

import math

from saccade.engine.golden.self_check import compare, compare_devices
from tests.support.engine import one_thread


def test_the_cpu_agrees_with_itself_on_every_class() -> None:
    with one_thread():
        found = compare_devices("cpu")
    assert (found.compared, found.differing, found.ok) == (3 * 2 * 31, 0, True)


def test_another_dtype_finds_much_the_same() -> None:
    with one_thread():
        found = compare_devices("cpu", "bfloat16")
    assert 0 < found.differing < found.compared / 2


def test_answers_elsewhere_missing_or_no_numbers_differ() -> None:
    theirs = [(0.5, 0.5)] * 10
    assert compare(theirs, theirs).ok
    assert compare([(0.5, 0.501), *theirs[1:]], theirs).ok
    for wrong in ((0.5, 0.6), (), (0.5, math.nan), (0.5, math.inf)):
        found = compare([wrong, *theirs[1:]], theirs)
        assert (found.differing, found.ok) == (1, False), wrong
    assert not compare([], []).ok
