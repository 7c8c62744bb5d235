"""Which worker gets the next stream, and how busy one is."""

from __future__ import annotations

import pytest

from saccade.pipeline.control.load import MAX_STREAMS, Candidate, Load, least_loaded


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([], None),
        ([Candidate("1", 0.0, MAX_STREAMS)], None),
        ([Candidate("1", 0.9, 4), Candidate("2", 0.2, 4)], "2"),
        ([Candidate("1", 0.9, 1), Candidate("2", 0.2, 9)], "2"),  # the load, not the count
        ([Candidate("1", 0.21, 3), Candidate("2", 0.24, 2)], "2"),  # as busy: the count
        ([Candidate("1", 0.0, 0), Candidate("2", 0.0, 0)], "1"),
        ([Candidate("1", 0.2, 4, new=2), Candidate("2", 0.3, 4)], "2"),  # two more, of .1 each, are on their way
        ([Candidate("1", 0.0, MAX_STREAMS), Candidate("2", 1.0, 9)], "2"),
    ],
)
def test_the_least_loaded_worker_gets_the_next_stream(workers: list[Candidate], chosen: str | None) -> None:
    assert least_loaded(workers) == chosen


@pytest.mark.parametrize("busy", [0.0, 0.04, 0.7])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_streams_that_are_opened_together_are_spread(workers: int, busy: float) -> None:
    counts = dict.fromkeys(map(str, range(workers)), 0)
    for _ in range(40):
        name = least_loaded(Candidate(one, busy, count, new=count) for one, count in counts.items())
        assert name is not None
        counts[name] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(
    ("readings", "shares"),
    [
        ([(0.0, 10.0), (0.5, 11.0), (0.5, 12.0)], [0.0, 0.5, 0.0]),
        ([(0.0, 10.0), (0.5, 11.0), (0.6, 11.1)], [0.0, 0.5, 0.5]),  # too early for another
        ([(7.0, 10.0), (9.5, 11.0)], [0.0, 1.0]),  # a step that began before
        ([(7.0, 10.0), (7.0, 10.0), (0.0, 11.0)], [0.0, 0.0, 0.0]),  # an engine that was replaced
    ],
)
def test_load_is_the_busy_share_of_the_engine(readings: list[tuple[float, float]], shares: list[float]) -> None:
    load = Load()
    assert [load.share(*reading) for reading in readings] == shares
