"""Coded packets as FFmpeg's containers hold them, made into one form."""

from __future__ import annotations

import io
import itertools
from fractions import Fraction

import av
import numpy as np
import pytest

from saccade.sources.live.packets import AudioPacket, AudioTap, CodedPacket, PacketTap
from tests.support.clips import number_of, numbered_image


def container_of(form: str) -> io.BytesIO:
    """Twenty numbered images in H.264."""
    data = io.BytesIO()
    with av.open(data, "w", format=form) as out:
        stream = out.add_stream("libx264", rate=Fraction(10), options={"g": "10", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
        for number in range(20):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(numbered_image(number, 160, 120), format="rgb24")))
        out.mux(stream.encode())
    data.seek(0)
    return data


@pytest.mark.parametrize("form", ["flv", "mp4", "mpegts"])  # as RTMP and HLS have them
def test_packets_of_any_container_decode_alone(form: str) -> None:
    packets: list[CodedPacket] = []
    with av.open(container_of(form)) as container:
        stream = container.streams.video[0]
        tap = PacketTap(stream)
        for packet in container.demux(stream):
            packets += tap.packets(packet, 1000.0)
    assert [number for number, packet in enumerate(packets) if packet.key] == [0, 10]
    steps = {later.pts - sooner.pts for sooner, later in itertools.pairwise(packets)}
    assert steps == {9000}
    assert all(packet.data[:3] == b"\0\0\1" or packet.data[:4] == b"\0\0\0\1" for packet in packets)
    coder = av.CodecContext.create("h264", "r")
    images = [
        frame.to_ndarray(format="rgb24")
        for packet in packets[10:]
        for frame in coder.decode(av.Packet(packet.parameter_sets + packet.data))
    ]
    images += [frame.to_ndarray(format="rgb24") for frame in coder.decode(None)]
    assert [number_of(image) for image in images] == list(range(10, 20))


@pytest.mark.parametrize("form", ["flv", "mp4", "mpegts"])
def test_sound_of_any_container_decodes_alone(form: str) -> None:
    data = io.BytesIO()
    with av.open(data, "w", format=form) as out:
        stream = out.add_stream("aac", rate=44100, layout="stereo")
        for number in range(20):
            frame = av.AudioFrame.from_ndarray(np.full((2, 1024), 0.1, np.float32), format="fltp", layout="stereo")
            frame.sample_rate, frame.pts = 44100, number * 1024
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    data.seek(0)
    packets: list[AudioPacket] = []
    with av.open(data) as container:
        tap = AudioTap(container.streams.audio[0])
        for packet in container.demux(container.streams.audio[0]):
            packets += tap.packets(packet)
    assert len(packets) >= 20
    assert {(one.codec, one.rate, one.channels, one.config[:2]) for one in packets} == {("aac", 44100, 2, b"\x12\x10")}
    assert all(abs(one.samples - 1024) < 50 for one in packets[:-1])  # FLV counts milliseconds
    steps = [later.pts - sooner.pts for sooner, later in itertools.pairwise(packets)]
    assert steps == pytest.approx([1024 * 90_000 / 44100] * len(steps), abs=91)
    coder = av.CodecContext.create("aac", "r")
    coder.extradata = packets[0].config
    assert sum(frame.samples for one in packets for frame in coder.decode(av.Packet(one.data))) >= 19 * 1024
