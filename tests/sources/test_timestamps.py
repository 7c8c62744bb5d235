"""Timestamps are kept where they are right and mended where they are not; all streams of a file share one clock."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.timestamps import InputClock, Timeline


def placed(pts: list[int | None], step: Fraction = Fraction(40), first: int = 0) -> list[int]:
    timeline = Timeline(step, first)
    return [timeline.place(p) for p in pts]


def test_right_timestamps_are_left_alone() -> None:
    stamps: list[int | None] = [-80, -40, 0, 41, 90, 5000]
    assert placed(stamps) == stamps


def test_missing_timestamps_follow_the_rate_without_drift() -> None:
    assert placed([None] * 7, step=Fraction(100, 3)) == [0, 33, 67, 100, 133, 167, 200]


def test_missing_timestamps_count_from_the_last_known() -> None:
    assert placed([100, None, None, 225, None]) == [100, 140, 180, 225, 265]


def test_the_first_missing_timestamp_is_the_given_one() -> None:
    assert placed([None, None], first=500) == [500, 540]


def test_a_repeated_timestamp_moves_on_by_one_unit_only() -> None:
    assert placed([0, 40, 40, 80, 79, 120]) == [0, 40, 41, 80, 81, 120]


@given(st.lists(st.none() | st.integers(-(10**6), 10**6), max_size=40), st.fractions(Fraction(1, 8), 5000))
def test_it_always_grows_strictly(stamps: list[int | None], step: Fraction) -> None:
    result = placed(stamps, step)
    assert all(a < b for a, b in itertools.pairwise(result))


@given(st.lists(st.integers(-(10**6), 10**6), unique=True, max_size=40))
def test_growing_timestamps_never_change(stamps: list[int]) -> None:
    assert placed(sorted(stamps)) == sorted(stamps)


V, A = Fraction(1, 90_000), Fraction(1, 48_000)
FRAME, SOUND = 3600, 1024


class Streams:
    """A clock of video and sound at 25 frames a second, which is told and asked seconds."""

    def __init__(self, *, jumps: bool = True) -> None:
        clock = InputClock(jumps=jumps)
        self.video, self.audio = clock.stream(V), clock.stream(A)

    def show(self, *seconds: float) -> list[float]:
        return [self._place(self.video, one, V, FRAME) for one in seconds]

    def play(self, *seconds: float) -> list[float]:
        return [self._place(self.audio, one, A, SOUND) for one in seconds]

    @staticmethod
    def _place(stream: object, seconds: float, base: Fraction, lasts: int) -> float:
        time = round(Fraction(seconds) / base)
        pts, dts = stream.place(time, time, lasts)  # type: ignore[attr-defined]
        assert pts == dts
        assert pts is not None
        return round(float(pts * base), 2)


@pytest.mark.parametrize("second", [5.0, 99.0, 20_000.0, 95_000.0])
@pytest.mark.parametrize("first_to_jump", ["video", "sound"])
def test_a_jump_is_closed_the_same_way_for_all_streams(second: float, first_to_jump: str) -> None:
    streams = Streams()
    assert streams.show(100, 100.04) == [100, 100.04]
    assert streams.play(100, 100.02, 100.04) == [100, 100.02, 100.04]
    if first_to_jump == "video":
        assert streams.show(second) == [100.08]
        assert streams.play(second, second + 0.02) == [100.08, 100.1]
    else:
        assert streams.play(second) == [100.06]
        assert streams.show(second, second + 0.04) == [100.06, 100.1]


def test_packets_from_before_the_jump_may_be_stored_behind_it() -> None:
    streams = Streams()
    streams.show(100, 100.04)
    streams.play(100)
    assert streams.show(5) == [100.08]
    assert streams.play(100.02, 100.04) == [100.02, 100.04]
    assert streams.play(5, 5.02) == [100.08, 100.1]


def test_many_jumps() -> None:
    streams = Streams()
    for number in range(200):
        begin = [30, 5, 70_000][number % 3]
        shown = streams.show(begin, begin + 0.04)
        assert shown == pytest.approx([30 + number * 0.08, 30 + number * 0.08 + 0.04], abs=0.011)
        assert streams.play(begin, begin + 0.02, begin + 0.04, begin + 0.06)[0] == shown[0]


def test_a_pause_of_one_stream_is_no_jump() -> None:
    streams = Streams()
    streams.play(0, 0.02)
    seconds = [number / 25 for number in range(1000)]
    assert streams.show(*seconds) == seconds
    assert streams.play(39.9, 39.92) == [39.9, 39.92]


def test_a_gap_is_kept_where_clocks_do_not_jump_up_to_a_day() -> None:
    streams = Streams(jumps=False)
    assert streams.show(0, 3600, 90_000, 90_000.04) == [0, 3600, 90_000, 90_000.04]
    assert streams.show(200_000) == [90_000.08]


def test_a_clock_that_falls_back_is_a_jump_everywhere() -> None:
    streams = Streams(jumps=False)
    streams.show(100, 100.04)
    streams.play(100, 100.02, 100.04)
    assert streams.show(7, 7.04) == [100.08, 100.12]
    assert streams.play(7, 7.02) == [100.08, 100.1]


def test_a_little_back_is_none() -> None:
    assert Streams().show(0, 0.04, 0.02, 0.08) == [0, 0.04, 0.02, 0.08]


def test_a_wrong_time_of_one_packet_is_taken_for_missing() -> None:
    for wrong in (10**15, -(10**15), 500_000_000):
        stream = InputClock(jumps=True).stream(V)
        stamps = [0, 3600, wrong, 10_800, 14_400]
        placed = [
            stream.place(one, one, FRAME, following) for one, following in itertools.zip_longest(stamps, stamps[1:])
        ]
        assert placed == [(0, 0), (3600, 3600), (None, None), (10_800, 10_800), (14_400, 14_400)]


def test_frames_in_another_order_than_they_are_decoded() -> None:
    packets = [(80, 0), (240, 40), (160, 80), (120, 120), (200, 160)]
    stream = InputClock(jumps=True).stream(Fraction(1, 1000))
    assert [stream.place(*one, 40) for one in packets] == packets
    jumped = [stream.place(pts + 50_000, dts + 50_000, 40) for pts, dts in packets]
    assert jumped == [(pts + 200, dts + 200) for pts, dts in packets]
    without = InputClock(jumps=True).stream(Fraction(1, 1000))
    assert [without.place(pts, None, 40) for pts, _ in packets] == [(pts, None) for pts, _ in packets]


def test_a_time_of_presentation_that_cannot_be_true_is_missing() -> None:
    stream = InputClock(jumps=True).stream(V)
    assert stream.place(10**12, 0, FRAME) == (None, 0)
    assert stream.place(None, 3600, FRAME) == (None, 3600)
    assert stream.place(None, None, None) == (None, None)
    assert stream.place(2**63 - 1, -(2**63), 2**63 - 1) == (None, None)


@pytest.mark.parametrize(("base", "step"), [(Fraction(0), None), (Fraction(-1), None), (V, Fraction(0))])
def test_a_base_and_a_step_are_more_than_nothing(base: Fraction, step: Fraction | None) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        InputClock(jumps=True).stream(base, step)


INT64 = st.integers(-(2**63), 2**63 - 1)
ANY_TIME = st.none() | st.sampled_from([0, 2**62, -(2**62), 2**63 - 1, -(2**63)]) | INT64 | st.integers(-(10**7), 10**7)
ANY_BASE = st.builds(Fraction, st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))


@given(
    st.booleans(),
    ANY_BASE,
    ANY_BASE,
    st.lists(st.tuples(st.booleans(), ANY_TIME, ANY_TIME, ANY_TIME, ANY_TIME), max_size=60),
)
def test_whatever_comes_times_stay_in_64_bits(
    jumps: bool,
    one: Fraction,
    other: Fraction,
    packets: list[tuple[bool, int | None, int | None, int | None, int | None]],
) -> None:
    clock = InputClock(jumps=jumps)
    streams = clock.stream(one), clock.stream(other)
    for second, *times in packets:
        for placed in streams[second].place(*times):
            assert placed is None or -(2**63) < placed < 2**63


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=60), st.booleans())
def test_packets_that_grow_without_long_gaps_never_change(stamps: list[int], jumps: bool) -> None:
    stream = InputClock(jumps=jumps).stream(V)
    assert [stream.place(one, one, 1)[1] for one in sorted(stamps)] == sorted(stamps) or max(
        b - a for a, b in itertools.pairwise(sorted(stamps))
    ) > 10 / V


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 50)), min_size=1, max_size=8))
def test_joined_recordings_last_as_long_as_their_parts(parts: list[tuple[int, int]]) -> None:
    """Each is a beginning and a count of frames; both streams of all parts are in step, but for one packet of each."""
    streams, shown = Streams(), []
    for begin, count in parts:
        pictures = streams.show(*(begin + number / 25 for number in range(count)))
        sounds = streams.play(*(begin + number / 25 for number in range(count)))
        assert sounds == pytest.approx(pictures, abs=1.1)
        shown += pictures
    assert shown[-1] - shown[0] <= sum(count for _, count in parts) / 25 + 10 * len(parts)
    assert all(later > earlier - 1.01 for earlier, later in itertools.pairwise(shown))
