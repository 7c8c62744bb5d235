"""Fragments of coded frames: every frame is in one, at its time, whatever is predicted from what."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sinks.recording.cutter import FRAGMENT_S, FragmentCutter, TimedPacket
from saccade.sinks.video.fragments import VIDEO_SCALE
from saccade.sources.live.packets import CodedPacket
from tests.support.packets import coded


def cut(packets: list[CodedPacket]) -> list[list[TimedPacket]]:
    cutter = FragmentCutter()
    found = [cutter.push(packet) for packet in packets]
    return [fragment for fragment in [*found, cutter.close()] if fragment]


@pytest.mark.parametrize("frames_ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_each_frame_is_shown_at_its_time(codec: str, frames_ahead: int) -> None:
    packets = coded(45, codec=codec, frames_ahead=frames_ahead)
    first = min(packet.pts for packet in packets)
    fragments = cut(packets)
    assert [one.packet for fragment in fragments for one in fragment] == packets
    assert all(one.decode + one.offset == one.packet.pts - first for fragment in fragments for one in fragment)
    timed = list(itertools.chain(*fragments))
    assert [one.decode for one in timed] == [number * 9000 for number in range(45)]
    assert {one.duration for one in timed} == {9000}
    assert all(fragment[0].packet.key for fragment in fragments), "key frames come once a second"
    if codec == "h264":  # of H.265 some frames come after the key frame that they are shown before
        assert [len(fragment) for fragment in fragments][:4] == [10, 10, 10, 10]


def test_a_fragment_ends_without_a_key_frame() -> None:
    packets = [CodedPacket("h264", b"", b"x", 9000 * number, 0.0, number == 0) for number in range(35)]
    assert [len(fragment) for fragment in cut(packets)] == [10, 10, 10, 5]


@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), st.booleans()), min_size=1, max_size=300))
def test_any_times_make_fragments_that_grow(times: list[tuple[int, bool]]) -> None:
    packets = [CodedPacket("h264", b"", b"x", pts, 0.0, key) for pts, key in times]
    timed = list(itertools.chain(*cut(packets)))
    assert [one.packet for one in timed] == packets
    assert all(one.duration >= 1 for one in timed)
    assert all(a.decode + a.duration == b.decode for a, b in itertools.pairwise(timed))


@given(st.lists(st.integers(1, int(FRAGMENT_S * VIDEO_SCALE) - 1), min_size=1, max_size=200))
def test_nothing_waits_for_longer_than_two_frames_and_a_fragment(steps: list[int]) -> None:
    cutter, handed = FragmentCutter(), 0
    for number, pts in enumerate(itertools.accumulate(steps)):
        handed += len(cutter.push(CodedPacket("h264", b"", b"x", pts, 0.0, number == 0)))
        waiting = sum(steps[handed + 1 : number + 1])
        assert waiting <= 2 * FRAGMENT_S * VIDEO_SCALE
