from __future__ import annotations

import io
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse

import av
import pytest

from saccade.sinks.video.fragments import boxes_in
from tests.support.clips import number_of
from tests.support.webrtc import leaving_no_thread, until
from tests.support.whep import HEIGHT, WIDTH, Stage, staging

PATH = "/streams/door/live.mp4"


@contextmanager
def response_of(stage: Stage, query: str = "") -> Iterator[HTTPResponse]:
    with urllib.request.urlopen(f"{stage.url}{PATH}{query}", timeout=10) as response:
        yield response


def boxes_of(response: HTTPResponse, frames: int) -> list[tuple[bytes, bytes]]:
    """The boxes of a live response up to a number of frames, each with its head."""
    boxes: list[tuple[bytes, bytes]] = []
    while sum(kind == b"mdat" for kind, _ in boxes) < frames:
        head = response.read(8)
        boxes.append((head[4:], head + response.read(int.from_bytes(head[:4]) - 8)))
    return boxes


def messages_in(boxes: list[tuple[bytes, bytes]]) -> list[tuple[int, dict[str, object]]]:
    """Time and message of each `emsg` box."""
    parts = [dict(boxes_in(box))[kind] for kind, box in boxes if kind == b"emsg"]
    return [(int.from_bytes(one[8:16]), json.loads(one[24:].split(b"\0", 2)[2])) for one in parts]


def test_a_player_shows_each_frame_once_and_at_its_time() -> None:
    with leaving_no_thread(), staging() as stage:
        with response_of(stage, "?overlay=off") as response:
            kind = response.headers["Content-Type"]
            boxes = boxes_of(response, 20)
            assert stage.whep.n_open == 1
        assert kind.startswith('video/mp4; codecs="avc1.')
        assert [kind for kind, _ in boxes[:3]] == [b"ftyp", b"uuid", b"moov"]
        video = io.BytesIO(b"".join(box for kind, box in boxes if kind != b"emsg"))
        with av.open(video) as played:
            frames = list(played.decode(video=0))
        assert len(frames) == 20
        assert (frames[0].width, frames[0].height) == (WIDTH, HEIGHT)
        numbers = [number_of(frame.to_ndarray(format="rgb24")) for frame in frames]
        assert all(0 < (b - a) % 256 < 10 for a, b in itertools.pairwise(numbers))
        records = messages_in(boxes)
        assert [record["frame"] for _, record in records] == numbers  # each record precedes its frame
        assert [at for at, _ in records] == [record["rtp_timestamp"] for _, record in records]
        assert [round(90_000 * float(frame.time or 0)) for frame in frames] == [at for at, _ in records]
        until(lambda: stage.whep.n_open == 0)
        assert stage.videos._streams["door"]._renditions == {}  # nothing is encoded without viewers


def test_the_prompts_come_first() -> None:
    with staging(answer=lambda stream, text: json.dumps({"prompts": {"detect": [stream]}})) as stage:
        with response_of(stage) as response:
            (_, first), (_, second) = messages_in(boxes_of(response, 1))
        assert first == {"prompts": {"detect": ["door"]}}
        assert second["stream"] == "door"


def test_a_smaller_video_may_be_asked_for() -> None:
    with staging() as stage, response_of(stage, "?width=160") as response:
        video = io.BytesIO(b"".join(box for kind, box in boxes_of(response, 2) if kind != b"emsg"))
    with av.open(video) as played:
        assert played.streams.video[0].width == 160


@pytest.mark.parametrize(
    ("path", "status"),
    [("/streams/cellar/live.mp4", 404), (f"{PATH}?width=7", 400), (PATH, 503)],
    ids=["unknown stream", "bad width", "too many viewers"],
)
def test_a_request_that_cannot_be_served_is_refused(path: str, status: int) -> None:
    with staging(max_viewers=1) as stage, response_of(stage) as response:
        boxes_of(response, 1)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"{stage.url}{path}", timeout=10)
        assert raised.value.code == status
        assert json.load(raised.value)["error"]


def test_the_response_ends_with_the_stream() -> None:
    with staging() as stage, response_of(stage) as response:
        boxes_of(response, 2)
        stage.stop_feeding()
        stage.videos.end("door")
        assert response.read() is not None
        until(lambda: stage.whep.n_open == 0)
