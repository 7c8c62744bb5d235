"""The states of a live source, when it counts as silent, and its backoff."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources import Reason
from saccade.sources.live.reconnect import (
    LAST_DELAY_S,
    NETWORK_DELAY_S,
    NO_FRAME_S,
    NO_PACKETS_S,
    SILENCE_S,
    STABLE_S,
    Link,
)

lasting = st.sampled_from(["tls", "not found", "codec unsupported"])
passing = st.sampled_from(["connection failed", "timeout"])


@given(reasons=st.lists(lasting, min_size=1, max_size=40), chance=st.floats(0, 1))
def test_backoff_doubles_from_half_a_second_to_thirty(reasons: list[Reason], chance: float) -> None:
    link = Link(lambda: chance)
    for number, reason in enumerate(reasons):
        delay = link.failed(reason)
        longest = min(LAST_DELAY_S, 0.5 * 2**number)
        assert 0.75 * longest <= delay <= longest
        assert link.status.reason == reason
        assert link.status.retry_s == delay


@given(reasons=st.lists(passing, min_size=1, max_size=40), chance=st.floats(0, 1))
def test_an_absent_camera_is_tried_every_few_seconds(reasons: list[Reason], chance: float) -> None:
    link = Link(lambda: chance)
    assert max(link.failed(reason) for reason in reasons) <= NETWORK_DELAY_S


@given(failures=st.integers(0, 20), took_s=st.floats(0, 20), chance=st.floats(0, 1))
def test_what_an_attempt_took_is_part_of_the_wait(failures: int, took_s: float, chance: float) -> None:
    link = Link(lambda: chance)
    for _ in range(failures):
        link.failed("timeout")
    link.attempt(100.0)
    longest = min(NETWORK_DELAY_S, 0.5 * 2**failures)
    delay = link.failed("timeout", now=100.0 + took_s)
    assert 0.75 * 0.5 <= delay <= max(0.5, longest - took_s) + 1e-9


@given(good_s=st.floats(0, 5), failures=st.integers(1, 20))
def test_backoff_resets_once_frames_flow(good_s: float, failures: int) -> None:
    link = Link(lambda: 0.0)
    for _ in range(failures):
        link.failed("tls")
    link.attempt(99.0)
    link.frame_arrived(100.0)
    link.frame_arrived(100.0 + good_s)
    expected = 0.5 if good_s >= STABLE_S else min(LAST_DELAY_S, 0.5 * 2**failures)
    assert link.failed("tls") == expected


@given(chance=st.floats(0, 1))
def test_a_refused_password_waits_for_over_30_minutes(chance: float) -> None:
    link = Link(lambda: chance)
    assert link.failed("auth failed", refused=True) > 30 * 60
    assert "auth failed, next attempt in" in str(link.status)
    assert link.failed("auth failed") <= LAST_DELAY_S  # none was given


events = st.lists(
    st.tuples(st.sampled_from(["attempt", "heard", "frame_arrived", "silent", "failed", "end"]), st.floats(0, 30)),
    max_size=60,
)


@given(events)
def test_every_state_follows_from_one_that_it_may_follow(events: list[tuple[str, float]]) -> None:
    may_follow = {
        "connecting": {"connecting", "live", "ended"},
        "live": {"live", "stalled", "reconnecting", "ended"},
        "stalled": {"stalled", "live", "reconnecting", "ended"},
        "reconnecting": {"reconnecting", "live", "ended"},
        "ended": {"ended"},
    }
    link, now = Link(lambda: 0.5), 0.0
    link.attempt(now)
    for name, passed in events:
        before, now = link.status, now + passed
        if name == "failed":
            link.failed("timeout")
        elif name == "end":
            link.end()
        elif name != "attempt" or before.state != "live":  # a live connection fails before the next is tried
            getattr(link, name)(now)
        after = link.status
        assert after.state in may_follow[before.state]
        assert after.connections - before.connections == (after.state == "live" != before.state)
        assert after.state != "live" or after.reason is None


def live_link(interval_s: float = 0.04) -> Link:
    link = Link()
    link.attempt(0.0)
    for number in range(20):
        link.frame_arrived(10.0 + number * interval_s)
    return link


def test_only_a_camera_that_was_live_can_be_stalled() -> None:
    link = Link()
    link.attempt(0.0)
    assert link.silent(SILENCE_S)
    assert link.status.state == "connecting"
    link = live_link()
    link.heard(13.0)
    assert not link.silent(13.0 + SILENCE_S - 0.1)
    assert link.silent(13.0 + SILENCE_S)
    assert str(link.status) == "stalled (timeout)"
    link.attempt(18.0)
    assert link.status.state == "reconnecting"


def test_replies_do_not_hide_that_the_video_has_stopped() -> None:
    link = live_link()
    for tenth in range(39):
        link.heard(10.76 + tenth / 10, media_at=10.76)
        assert not link.silent(10.76 + tenth / 10)
    link.heard(14.8, media_at=10.76)
    assert link.silent(14.8)


@pytest.mark.parametrize("interval_s", [6.0, 30.0])
def test_a_slow_stream_is_not_silent_between_its_frames(interval_s: float) -> None:
    link, end = Link(), 0.0
    link.attempt(0.0)
    for number in range(8):
        begin, end = end, min(1.0 + number * interval_s, end + NO_PACKETS_S - 0.1 if number < 2 else 1e9)
        while begin < end:  # replies to keepalives go on
            begin = min(begin + 2.0, end)
            link.heard(begin, media_at=0.0)
            assert not link.silent(begin)
        link.frame_arrived(end)
    assert link.status.connections == 1


@pytest.mark.parametrize("interval_s", [6.0, 10.0, 60.0])
def test_a_camera_that_sends_nothing_but_an_image_now_and_then_is_waited_for_in_the_end(interval_s: float) -> None:
    link, now = Link(lambda: 0.0), 0.0
    link.frames_only = True
    for _ in range(4):  # attempts, each of which gives an image at once
        link.attempt(now)
        link.frame_arrived(now)
        for _ in range(20):
            if link.silent(now + interval_s - 0.1):
                now += link.failed("timeout", now=now) + interval_s
                break
            now += interval_s
            link.frame_arrived(now)
        else:
            break
    assert link.status.state == "live"
    assert link.status.connections <= 3
    assert link.silent(now + 4 * interval_s)  # frozen


def test_a_camera_that_freezes_after_its_first_frame_is_noticed() -> None:
    link = Link()
    link.attempt(0.0)
    link.frame_arrived(1.0)
    assert not link.silent(1.0 + SILENCE_S - 0.1)
    assert link.silent(1.0 + SILENCE_S)
    assert link.status.state == "stalled"


def test_a_camera_that_slows_down_is_tried_again_once() -> None:
    link, now = live_link(), 10.0 + 19 * 0.04
    link.frames_only = True
    assert link.silent(now + 9.9)
    link.failed("timeout")
    for number in range(30):
        now += 10.0
        if number:
            assert not link.silent(now - 0.1)
        else:
            link.attempt(now)
        link.frame_arrived(now)
    assert link.status.connections == 2


def test_packets_without_frames_are_silence_after_a_while() -> None:
    link = live_link()
    for second in range(11, 11 + int(NO_FRAME_S) - 1):
        link.heard(second)
        assert not link.silent(second)
    link.heard(11 + NO_FRAME_S)
    assert link.silent(11 + NO_FRAME_S)
