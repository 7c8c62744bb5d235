"""Whatever times packets have, what is written is what FFmpeg's muxers take: tables, and real muxers fed with anything.

FFmpeg asserts some of it, which ends the process: what reaches a muxer here does so in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from saccade.sinks.video.packet_times import LONGEST_UNITS, PacketTimes, Times
from tests.support import REPO

MS, RTP = Fraction(1, 1000), Fraction(1, 90000)
Packet = tuple[int | None, int | None, int | None]


def placed(packets: list[Packet], base: Fraction | None = MS, out: Fraction = MS) -> list[Times | None]:
    times = PacketTimes(out)
    return [times.place(*packet, base) for packet in packets]


@pytest.mark.parametrize(
    ("packets", "expected"),
    [
        pytest.param([(0, 0, 40), (40, 40, 40)], [(0, 0, 40), (40, 40, 40)], id="right ones"),
        pytest.param([(80, 0, 40), (200, 40, 40), (120, 80, 40)], [(80, 0, 40), (200, 40, 40), (120, 80, 40)], id="B"),
        pytest.param([(0, 0, 40), (0, 0, 40), (0, 0, 40)], [(0, 0, 40), (1, 1, 40), (2, 2, 40)], id="equal"),
        pytest.param([(50, 50, 9), (20, 20, 9), (60, 60, 9)], [(50, 50, 9), (51, 51, 9), (60, 60, 9)], id="back"),
        pytest.param([(0, None, 40), (40, None, 40)], [(0, 0, 40), (40, 1, 40)], id="without decoding"),
        pytest.param([(None, 0, 40), (None, 40, 40)], [(0, 0, 40), (40, 40, 40)], id="without presentation"),
        pytest.param([(None, None, 5), (None, None, 5)], [(0, 0, 5), (1, 1, 5)], id="without any"),
        pytest.param([(0, 0, None), (40, 40, 0), (80, 80, -7)], [(0, 0, 1), (40, 40, 40), (80, 80, 40)], id="length"),
        pytest.param([(0, 40, 40)], [(40, 40, 40)], id="shown before it is decoded"),
        pytest.param([(2**40, 0, 40)], [(0, 0, 40)], id="shown much later"),
        pytest.param([(-50, -90, 40), (-10, -50, 40), (30, -10, 40)], [(0, 0, 40), (1, 1, 40), (30, 2, 40)], id="< 0"),
        pytest.param([(-(2**50), -(2**50), 40)], [(0, 0, 40)], id="long before 0"),
        pytest.param([(0, 0, 1), (2**31, 2**31, 1), (9, 9, 1)], [(0, 0, 1), None, (9, 9, 1)], id="gap"),
        pytest.param([(2**40, 2**40, 1), (5, 5, 1)], [None, (5, 5, 1)], id="far from the beginning"),
        pytest.param([(2**63 - 1, -(2**63), 2**63 - 1)], [(0, 0, 1)], id="the ends of 64 bits"),
    ],
)
def test_times_that_are_written(packets: list[Packet], expected: list[tuple[int, int, int] | None]) -> None:
    assert placed(packets) == [None if one is None else Times(*one) for one in expected]


def test_units_become_those_of_the_file() -> None:
    assert placed([(1, 1, 1), (2, 2, 1)], Fraction(1, 25), RTP) == [Times(3600, 3600, 3600), Times(7200, 7200, 3600)]
    assert placed([(0, 0, 1), (1, 1, 1)], Fraction(1, 10**9), MS)[1] == Times(1, 1, 1)  # it grows all the same


@pytest.mark.parametrize("base", [None, Fraction(0), Fraction(-1, 25)])
def test_a_base_that_is_none_makes_every_time_missing(base: Fraction | None) -> None:
    assert placed([(7, 7, 7), (9, 9, 9)], base) == [Times(0, 0, 1), Times(1, 1, 1)]


@pytest.mark.parametrize("base", [Fraction(0), Fraction(-1, 3)])
def test_a_file_has_a_base(base: Fraction) -> None:
    with pytest.raises(ValueError, match="the time base must be positive"):
        PacketTimes(base)


EDGES = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**33, 2**62, 2**63 - 1, -(2**31), -(2**63) + 1]
ANY_TIME = st.none() | st.sampled_from(EDGES) | st.integers(-(2**63) + 1, 2**63 - 1) | st.integers(-(10**6), 10**6)
ANY_PACKET = st.tuples(ANY_TIME, ANY_TIME, ANY_TIME)
INT32 = st.sampled_from([1, 2, 1000, 1001, 90_000, 2**31 - 1]) | st.integers(1, 2**31 - 1)
ANY_BASE = st.builds(Fraction, INT32, INT32)


@given(st.lists(ANY_PACKET, max_size=30), ANY_BASE, st.integers(1, 1_000_000).map(lambda n: Fraction(1, n)))
def test_whatever_comes_the_file_is_right(packets: list[Packet], base: Fraction, out: Fraction) -> None:
    kept = [one for one in placed(packets, base, out) if one is not None]
    gaps = [later.dts - earlier.dts for earlier, later in itertools.pairwise(kept)]
    assert all(0 < gap <= LONGEST_UNITS for gap in gaps)
    assert all(0 <= one.pts - one.dts <= LONGEST_UNITS and 0 < one.duration <= LONGEST_UNITS for one in kept)
    assert all(one.dts >= 0 for one in kept)


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=40))
def test_growing_times_never_change(stamps: list[int]) -> None:
    assert placed([(one, one, 1) for one in sorted(stamps)]) == [Times(one, one, 1) for one in sorted(stamps)]


CHILD = """
import io, json, sys
from fractions import Fraction
import av
import numpy as np
from saccade.sinks.video.muxer import Muxer
from saccade.sinks.video.mp4_writer import open_mp4

def packets(name, frames, **settings):
    coder = av.CodecContext.create(name, "w")
    for key, value in settings.items():
        setattr(coder, key, value)
    return [packet for frame in [*frames, None] for packet in coder.encode(frame)], coder

def images():
    for number in range(12):
        frame = av.VideoFrame(32, 32, "yuv420p")
        frame.pts, frame.time_base = number, Fraction(1, 25)
        yield frame

def tones():
    for number in range(12):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, number * 1024, Fraction(1, 48000)
        yield frame

out = io.BytesIO()
for case in json.load(sys.stdin):
    path = sys.argv[1]
    container = open_mp4(path, case["timescale"]) if case["fragmented"] else av.open(path, "w")
    with container:
        video = container.add_stream("libx264", rate=25, options={"preset": "ultrafast", "tune": "zerolatency"})
        video.width = video.height = 32
        video.pix_fmt, video.time_base = "yuv420p", Fraction(1, case["timescale"])
        audio = container.add_stream("aac", rate=48000, layout="mono")
        audio.codec_context.open()
        muxer = Muxer(container)
        kept = {0: 0, 1: 0}
        pictures = [packet for frame in images() for packet in video.encode(frame)]
        sounds = [packet for frame in tones() for packet in audio.encode(frame)]
        for packet, stream, times in zip(
            [one for pair in zip(pictures, sounds) for one in pair], [video, audio] * 12, case["packets"]
        ):
            packet.pts, packet.dts, duration = times[:3]
            packet.duration = duration
            packet.time_base = Fraction(*times[3])
            kept[stream.index] += muxer.mux(packet, stream)
    with av.open(path) as written:
        read = {0: 0, 1: 0}
        for packet in written.demux():
            if packet.size:
                read[{"video": 0, "audio": 1}[packet.stream.type]] += 1
        # A reader leaves out what is shown before the file begins, as garbage may say.
        assert all(read[index] <= kept[index] for index in read), (read, kept)
print("all written")
"""


def run_muxers(cases: list[dict[str, object]], folder: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(folder / "fuzz.mp4")]
    ended = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, cwd=REPO, check=False)
    assert (ended.returncode, ended.stdout) == (0, "all written\n"), ended.stderr[-2000:]


def case_of(packets: list[tuple[Packet, tuple[int, int]]], timescale: int, fragmented: bool) -> dict[str, object]:
    return {
        "packets": [(*packet, base) for packet, base in packets],
        "timescale": timescale,
        "fragmented": fragmented,
    }


MUXED = st.builds(
    case_of,
    st.lists(st.tuples(ANY_PACKET, st.tuples(INT32, INT32)), min_size=4, max_size=16),
    st.sampled_from([1000, 12_800, 90_000, 1_000_000]),
    st.booleans(),
)


@settings(
    max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(MUXED, min_size=20, max_size=40))
def test_no_time_ends_a_muxer(tmp_path: Path, cases: list[dict[str, object]]) -> None:
    run_muxers(cases, tmp_path)


@pytest.mark.parametrize("fragmented", [True, False])
def test_known_killers(tmp_path: Path, fragmented: bool) -> None:
    def steady(count: int, *others: tuple[int, int]) -> list[tuple[Packet, tuple[int, int]]]:
        found = []
        for number in range(count):
            for base, step in others:
                found.append(((number * step, number * step, step), (1, base)))
        return found

    whole = steady(8, (90_000, 3600), (48_000, 1024))
    audio_gap = [
        (((one[0] or 0) + 2**32, (one[1] or 0) + 2**32, one[2]), base) if number > 8 and number % 2 else (one, base)
        for number, (one, base) in enumerate(whole)
    ]
    both = [(((one[0] or 0) + (number > 8) * 2**40,) * 2 + (one[2],), base) for number, (one, base) in enumerate(whole)]
    lengths = [((one[0], one[1], 2**62), base) for one, base in whole]
    run_muxers([case_of(one, 90_000, fragmented) for one in (whole, audio_gap, both, lengths)], tmp_path)
