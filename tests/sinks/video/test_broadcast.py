"""The encoder for people who watch now, and the sink that codes a stream once for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from saccade.engine.results import Box, Detections, Points, Result
from saccade.sinks import Latency
from saccade.sinks.video import broadcast as broadcast_module
from saccade.sinks.video.broadcast import BroadcastSink, NoSuchStreamError, Shown, View, Viewer
from saccade.sinks.video.encoder import Codec, EncodedImage, LiveEncoder, bit_rate
from saccade.sources import Frame
from tests.support.clips import number_of, numbered_image
from tests.support.sinks.results import LATENCY

DECODERS = {"H264": "h264", "VP8": "vp8"}
CODECS: tuple[Codec, ...] = ("H264", "VP8")


class Decoder:
    """Decodes what comes, as a viewer's browser does."""

    def __init__(self, codec: Codec) -> None:
        self._decoder: Any = av.CodecContext.create(DECODERS[codec], "r")

    def show(self, encoded: EncodedImage) -> NDArray[np.uint8]:
        (frame,) = self._decoder.decode(av.Packet(encoded.data))
        shown: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
        return shown


def frame(number: int, stream: str = "door", size: tuple[int, int] = (320, 240)) -> Frame:
    image = numbered_image(number % 256, *size)
    return Frame(image, stream, number, number * 3000, Fraction(1, 90_000), 1.0, "arrival", time.monotonic(), 1.0)


def found(*boxes: Box) -> Result:
    return Result(Detections(boxes, 320, 240), Points((), 320, 240))


# ---- the encoder


@pytest.mark.parametrize("codec", CODECS)
def test_the_encoder_has_no_delay_and_obeys_key_requests(codec: Codec) -> None:
    encoder, screen = LiveEncoder(codec), Decoder(codec)
    keys = []
    for number in range(30):
        encoded = encoder.encode(numbered_image(number, 320, 240), number * 3000, 30.0, key=number in (12, 13))
        assert encoded is not None
        assert number_of(screen.show(encoded)) == number  # this very frame, not an earlier one
        keys += [number] if encoded.key else []
    assert keys == [0, 12, 13]


@pytest.mark.parametrize("codec", CODECS)
def test_a_new_frame_size_begins_with_a_key_frame(codec: Codec) -> None:
    encoder, screen = LiveEncoder(codec), Decoder(codec)
    sizes = {(320, 240): (320, 240), (161, 91): (162, 92), (3840, 2160): (1920, 1080), (90, 160): (90, 160)}
    for number, (size, shown) in enumerate(sizes.items()):
        encoded = encoder.encode(numbered_image(7, *size), number * 3000, 30.0)
        assert encoded is not None
        assert encoded.key
        height, width = screen.show(encoded).shape[:2]
        assert (width, height) == shown


def test_colours_survive() -> None:
    frame = np.zeros((120, 160, 3), np.uint8)
    frame[:] = (200, 60, 90)
    for codec in CODECS:
        encoded = LiveEncoder(codec).encode(frame, 0, 30.0)
        assert encoded is not None
        decoder: Any = av.CodecContext.create(DECODERS[codec], "r")
        (decoded,) = decoder.decode(av.Packet(encoded.data))
        assert np.abs(decoded.to_ndarray(format="rgb24").astype(int) - frame).mean() < 12


def test_a_still_scene_is_cheap_and_a_busy_one_is_bounded() -> None:
    rate = 30.0
    grain = np.random.default_rng(1)
    sums = []
    for busy in (False, True):
        encoder, total = LiveEncoder("H264"), 0
        for number in range(60):
            frame = numbered_image(3, 320, 240)
            if busy:
                frame = grain.integers(0, 256, frame.shape, dtype=np.uint8)
            encoded = encoder.encode(frame, number * 3000, rate)
            total += len(encoded.data) if encoded and number >= 30 else 0
        sums.append(8 * total)  # bits in a second
    still, moving = sums
    assert still < 0.05 * bit_rate(320, 240, rate)
    assert moving < 1.3 * bit_rate(320, 240, rate)


def test_the_bit_rate_grows_slower_than_the_image() -> None:
    assert bit_rate(640, 360, 30) == 1_500_000
    assert 3_500_000 < bit_rate(1280, 720, 30) < 4_500_000
    assert 6_000_000 < bit_rate(1920, 1080, 30) < 8_000_000
    assert bit_rate(640, 360, 10) < bit_rate(640, 360, 30)


# ---- the sink


@pytest.fixture
def encoder_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The codec of each frame that is encoded, as it is encoded."""
    made: list[str] = []

    class Counted(LiveEncoder):
        def encode(self, *args: Any, **kwargs: Any) -> EncodedImage | None:
            made.append(self._codec)
            return super().encode(*args, **kwargs)

    monkeypatch.setattr(broadcast_module, "LiveEncoder", Counted)
    return made


def take_all(viewer: Viewer) -> list[Any]:
    taken = []
    while frame := viewer.take():
        taken.append(frame)
    return taken


def test_viewers_share_one_encoder_and_none_needs_none(encoder_calls: list[str]) -> None:
    sink = BroadcastSink()
    sink.write(frame(0), found(), Latency())
    assert encoder_calls == []
    joined = [sink.join("door", View(), lambda: None) for _ in range(5)]
    for number in range(1, 4):
        sink.write(frame(number), found(), Latency())
    assert encoder_calls == ["H264"] * 3
    frames = [take_all(viewer) for viewer in joined]
    assert all(len(taken) == 3 and taken == frames[0] for taken in frames)
    sink.join("door", View(codec="VP8"), lambda: None)
    for viewer in joined:
        viewer.leave()
        viewer.leave()
    sink.write(frame(4), found(), Latency())
    assert encoder_calls == ["H264"] * 3 + ["VP8"]


def test_each_view_gets_its_image_and_all_get_the_record() -> None:
    sink, box = BroadcastSink(), Box("cat", 0.9, 0.3, 0.3, 0.7, 0.7)
    sink.write(frame(0), found(box), Latency())
    views = [sink.join("door", View(drawn), lambda: None) for drawn in (True, False)]
    sink.write(frame(1), found(box), Latency())
    (drawn,), (plain,) = (take_all(viewer) for viewer in views)
    assert drawn.record == plain.record
    assert drawn.record["objects"][0]["label"] == "cat"
    source = frame(1).image.astype(int)
    with_box, without = (np.abs(Decoder("H264").show(one.encoded) - source).max(axis=2) > 80 for one in (drawn, plain))
    assert without.mean() < 0.001
    assert with_box.mean() > 0.01


def test_a_slow_viewer_skips_to_a_key_frame_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_module, "_KEY_FRAMES_S", 0.0)
    sink = BroadcastSink()
    sink.write(frame(0), found(), Latency())
    slow = sink.join("door", View(), lambda: None)
    quick = sink.join("door", View(), lambda: None)
    seen = []
    for number in range(1, 41):
        sink.write(frame(number), found(), Latency())
        seen += [frame.record["frame"] for frame in take_all(quick)]
    assert seen == list(range(1, 41))
    kept = take_all(slow)
    assert len(kept) <= 8  # a bounded queue, of the newest
    assert kept[0].encoded.key
    assert kept[-1].record["frame"] == 40
    assert slow.skipped == 40 - len(kept)
    screen = Decoder("H264")
    assert [number_of(screen.show(one.encoded)) for one in kept] == [one.record["frame"] for one in kept]


def test_key_frame_requests_are_limited() -> None:
    sink = BroadcastSink()
    sink.write(frame(0), found(), Latency())
    greedy = sink.join("door", View(), lambda: None)
    modest = sink.join("door", View(), lambda: None)
    begun = time.monotonic()
    keys = 0
    for number in range(1, 31):
        greedy.request_key_frame()
        sink.write(frame(number), found(), Latency())
        keys += sum(frame.encoded.key for frame in take_all(modest))
    assert keys <= 1 + (time.monotonic() - begun) / 0.5 + 1


def test_the_end_of_a_stream_ends_its_viewers() -> None:
    sink, woken = BroadcastSink(), []
    with pytest.raises(NoSuchStreamError):
        sink.join("door", View(), lambda: None)
    sink.write(frame(0), found(), Latency())
    sink.write(frame(0, "yard"), found(), Latency())
    wake: Callable[[], None] = lambda: woken.append(True)  # noqa: E731
    viewer = sink.join("door", View(), wake)
    sink.end("door")
    assert viewer.ended
    assert woken
    assert sink.streams == ["yard"]
    viewer.leave()
    sink.close()
    sink.close()
    assert sink.streams == []


@pytest.mark.parametrize(
    ("aspect", "width", "size"),
    [(Fraction(3, 2), None, (480, 240)), (Fraction(3, 2), 240, (240, 120)), (Fraction(1, 2), None, (320, 480))],
)
def test_viewers_see_square_pixels(aspect: Fraction, width: int | None, size: tuple[int, int]) -> None:
    """Browsers do not stretch the video of a call."""
    shown = Shown(replace(frame(0), pixel_aspect=aspect), found(), LATENCY)
    image = shown.image(drawn=False, width=width)
    assert (image.shape[1], image.shape[0]) == size


def test_a_viewer_with_a_slow_connection_has_an_encoder_of_its_own() -> None:
    sink, dice = BroadcastSink(), np.random.default_rng(0)
    sink.write(frame(0), found(), Latency())
    quick, slow = (sink.join("door", View(drawn=False), lambda: None) for _ in range(2))
    sent = {quick: 0, slow: 0}
    for number in range(1, 60):
        noise = dice.integers(0, 255, (240, 320, 3), dtype=np.uint8)
        sink.write(replace(frame(number), image=noise), found(), Latency())
        if number == 10:
            slow.set_halvings(3)
            slow.set_halvings(2)
        for viewer in sent:
            taken = take_all(viewer)
            assert len(taken) == 1
            assert taken[0].encoded.key or number not in (1, 11) or (number == 11 and viewer is quick)
            sent[viewer] += len(taken[0].encoded.data) if number > 20 else 0
        time.sleep(1 / 60)
    assert sent[slow] < 0.6 * sent[quick]
    slow.leave()
    slow.set_halvings(0)  # after it has left
    sink.write(frame(61), found(), Latency())
    assert not take_all(slow)
