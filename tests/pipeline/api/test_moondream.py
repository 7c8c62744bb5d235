"""Moondream's API, by its own client and by plain requests."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest
from PIL import Image

from tests.pipeline.api.conftest import TOKEN


def data_url(photo: Image.Image, kind: str = "JPEG") -> str:
    file = io.BytesIO()
    photo.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def post(url: str, body: Any, token: str | None = TOKEN) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"X-Moondream-Auth": token} if token else {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_its_own_client_finds_boxes_and_points(finder: str, photo: Image.Image) -> None:
    moondream = pytest.importorskip("moondream")
    client = moondream.vl(endpoint=f"{finder}/v1", api_key=TOKEN)
    boxes = client.detect(photo, "people")["objects"]
    assert len(boxes) == 2
    assert all(0 <= box["x_min"] < box["x_max"] <= 1 and 0 <= box["y_min"] < box["y_max"] <= 1 for box in boxes)
    points = client.point(photo, "person")["points"]
    boxes.sort(key=lambda box: box["x_min"])  # by scores, boxes and points may be in other orders
    for box, point in zip(boxes, sorted(points, key=lambda one: one["x"]), strict=True):
        assert box["x_min"] < point["x"] < box["x_max"]
        assert box["y_min"] < point["y"] < box["y_max"]


def test_its_own_client_reads_texts_whole_and_streamed(talker: str, photo: Image.Image) -> None:
    moondream = pytest.importorskip("moondream")
    client = moondream.vl(endpoint=f"{talker}/v1")
    few = {"max_tokens": 6, "temperature": 0}
    answer = client.query(photo, "what is it?", settings=few)["answer"]
    assert answer
    pieces = list(client.query(photo, "what is it?", stream=True, settings=few)["answer"])
    assert ("".join(pieces), len(pieces) > 3) == (answer, True)
    caption = client.caption(photo, length="short", settings=few)["caption"]
    assert "".join(client.caption(photo, length="short", stream=True, settings=few)["caption"]) == caption


def test_its_own_client_outlines_and_refers(outliner: str, photo: Image.Image) -> None:
    moondream = pytest.importorskip("moondream")
    client = moondream.vl(endpoint=f"{outliner}/v1")
    refs, few = [[0.2, 0.3], [0.1, 0.4, 0.5, 0.8]], {"max_tokens": 20}
    found = client.segment(photo, "cat", settings=few)
    assert sorted(found) == ["bbox", "path"]
    assert sorted(found["bbox"]) == ["x_max", "x_min", "y_max", "y_min"]
    assert found["path"].startswith("M ")
    referred = client.segment(photo, "cat", spatial_refs=refs, settings=few)
    assert referred["path"].startswith("M ")
    assert referred != found
    first, *chunks, last = client.segment(photo, "cat", stream=True, settings=few)
    assert first == {"bbox": found["bbox"]}
    assert "".join(one["chunk"] for one in chunks) == found["path"]
    assert last == {"path": found["path"], "bbox": found["bbox"], "completed": True}
    points = client.point(photo, "cat", spatial_refs=refs, settings={"max_objects": 2, "conf": 0})["points"]
    assert len(points) == 2
    assert points != client.point(photo, "cat", settings={"max_objects": 2, "conf": 0})["points"]
    answer = client.query(photo, "why?", reasoning=True, spatial_refs=refs, settings=few)
    assert sorted(answer) == ["answer", "reasoning"]


def test_its_own_client_gets_the_refined_outline_last(refining: str, photo: Image.Image) -> None:
    moondream = pytest.importorskip("moondream")
    client = moondream.vl(endpoint=f"{refining}/v1")
    few = {"max_tokens": 60}
    found = client.segment(photo, "200", settings=few)
    first, *chunks, last = client.segment(photo, "200", stream=True, settings=few)
    assert last == {"path": found["path"], "bbox": found["bbox"], "completed": True}
    coarse = "".join(one["chunk"] for one in chunks)
    assert coarse.startswith("M ")
    assert (coarse, first["bbox"]) != (last["path"], last["bbox"])
    status, answer = post(f"{refining}/v1/segment", {"image_url": data_url(photo), "object": "200", "settings": few})
    assert (status, answer["refined"]) == (200, True)


def test_events_of_an_outline_are_in_the_documented_order(outliner: str, photo: Image.Image) -> None:
    asked = {"image_url": data_url(photo), "object": "cat", "stream": True, "settings": {"max_tokens": 20}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{outliner}/v1/segment", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: {")]
    kinds = [event["type"] for event in events]
    assert kinds == ["bbox", *["path_delta"] * (len(kinds) - 2), "final"]
    assert len(kinds) > 2
    assert all(event["completed"] is False for event in events[1:-1])
    assert (events[-1]["completed"], events[-1]["refined"]) == (True, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"object": ""}, "object"),
        ({"spatial_refs": [[1, 2]]}, "a ref must be a point"),
        ({"image_url": "data:image/png;base64,AAAA"}, "image"),
        ({"settings": {"max_tokens": 0}}, "max_tokens"),
    ],
)
def test_a_wrong_request_for_an_outline_is_one_line(
    outliner: str, photo: Image.Image, change: dict[str, Any], words: str
) -> None:
    status, answer = post(f"{outliner}/v1/segment", {"image_url": data_url(photo), "object": "cat", **change})
    message = answer["error"]["message"]
    assert (status, words in message, "\n" in message) == (400, True, False)


def test_nano_cannot_outline(finder: str, photo: Image.Image) -> None:
    status, answer = post(f"{finder}/v1/segment", {"image_url": data_url(photo), "object": "person"})
    assert (status, "nano can detect and point, not segment" in answer["error"]["message"]) == (400, True)


def test_texts_are_sampled_unless_a_temperature_of_0_is_given(talker: str, photo: Image.Image) -> None:
    asked = {"image_url": data_url(photo), "question": "why?", "reasoning": False}
    sampled = {post(f"{talker}/v1/query", {**asked, "settings": {"max_tokens": 12}})[1]["answer"] for _ in range(4)}
    greedy = {
        post(f"{talker}/v1/query", {**asked, "settings": {"max_tokens": 12, "temperature": 0}})[1]["answer"]
        for _ in range(3)
    }
    assert len(sampled) > 1
    assert len(greedy) == 1


def test_optional_fields_may_be_null(finder: str, talker: str, photo: Image.Image) -> None:
    url = data_url(photo)
    nothing = {"max_objects": None, "conf": None, "max_tokens": None, "temperature": None, "top_p": None}
    for settings in (None, nothing):
        asked = {"image_url": url, "object": "person", "stream": None, "settings": settings}
        for skill in ("detect", "point"):
            assert post(f"{finder}/v1/{skill}", asked)[0] == 200
    few = {**nothing, "max_tokens": 2}
    more = {"stream": None, "reasoning": None, "spatial_refs": None, "choices": None, "settings": few}
    assert post(f"{talker}/v1/query", {"image_url": None, "question": "why?", **more})[0] == 200
    assert post(f"{talker}/v1/caption", {"image_url": url, "length": None, "settings": few})[0] == 200
    content = [{"type": "text", "text": "why?"}, {"type": "image_url", "image_url": {"url": url, "detail": None}}]
    messages = [{"role": "user", "content": content, "name": None}, {"role": "assistant", "content": None}]
    chat = {"messages": messages, "max_tokens": 2, "stream": None, "stream_options": None}
    more = dict.fromkeys(("model", "n", "seed", "stop", "tools", "logprobs", "top_logprobs", "response_format", "user"))
    for kind in (None, {"type": None, "json_schema": None}):
        status, answer = post(f"{talker}/v1/chat/completions", chat | more | {"response_format": kind})
        assert status == 200, answer
    assert post(f"{finder}/v1/detect", {"image_url": url, "object": None})[0] == 400  # which must be given


def test_questions_reason_point_and_choose(talker: str, photo: Image.Image) -> None:
    asked = {"image_url": data_url(photo), "question": "why?", "settings": {"max_tokens": 6}}
    status, found = post(f"{talker}/v1/query", asked)  # reasons by default, as the makers' engine
    assert (status, sorted(found)) == (200, ["answer", "reasoning", "request_id"])
    status, plain = post(f"{talker}/v1/query", {**asked, "reasoning": False})
    assert (status, sorted(plain)) == (200, ["answer", "request_id"])
    refs = [[0.2, 0.3], [0, 0, 0.5, 1]]
    status, found = post(f"{talker}/v1/query", {**asked, "reasoning": True, "spatial_refs": refs})
    assert (status, sorted(found)) == (200, ["answer", "reasoning", "request_id"])
    assert found["reasoning"]["text"]
    for part in found["reasoning"]["grounding"]:
        assert sorted(part) == ["end_idx", "points", "start_idx"]
    status, found = post(f"{talker}/v1/query", {"question": "Is it?", "choices": ["yes", "no"]})
    assert (status, sum(found["probabilities"].values())) == (200, pytest.approx(1))
    assert found["answer"] == max(found["probabilities"], key=found["probabilities"].get)
    body = json.dumps({**asked, "reasoning": True, "stream": True}).encode()
    request = urllib.request.Request(f"{talker}/v1/query", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: {")]
    assert [event["completed"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["reasoning"]["text"]
    named = {"image_url": data_url(photo), "object": "person"}
    status, found = post(f"{talker}/v1/point", {**named, "spatial_refs": refs})  # which nano answers
    assert (status, found["error"]["message"]) == (
        400,
        "this model does not support refs (reference points and boxes); use only a label",
    )
    assert post(f"{talker}/v1/point", {**named, "spatial_refs": []})[0] == 200
    status, found = post(f"{talker}/v1/point", {**named, "spatial_refs": [[0.5, 7]]})
    assert (status, "a ref must be a point" in found["error"]["message"]) == (400, True)
    for wrong in ({"spatial_refs": [[1, 2, 3]]}, {"spatial_refs": [[0.5, 7]]}, {"choices": [""]}):
        status, answer = post(f"{talker}/v1/query", {**asked, **wrong})
        assert (status, "\n" in answer["error"]["message"]) == (400, False)


def test_answers_have_the_documented_keys(finder: str, photo: Image.Image) -> None:
    url = data_url(photo)
    status, found = post(f"{finder}/v1/detect", {"image_url": url, "object": "person", "settings": {"max_objects": 1}})
    assert (status, sorted(found), len(found["objects"])) == (200, ["objects", "request_id"], 1)
    status, found = post(f"{finder}/v1/point", {"image_url": url, "object": "person", "variant": "unknown"})
    assert (status, sorted(found), found["count"]) == (200, ["count", "points", "request_id"], 2)
    request = urllib.request.Request(f"{finder}/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request) as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["object"], "person" in model["classes"]) == ("nano", "model", True)


@pytest.mark.parametrize(
    ("path", "change", "status", "words"),
    [
        ("detect", {"object": "zebra"}, 400, "'zebra' is not a class of nano"),
        ("query", {"question": "who?"}, 400, "nano can detect and point, not query"),
        ("caption", {}, 400, "nano can detect and point, not caption"),
        ("detect", {"object": ""}, 400, "object"),
        ("detect", {}, 400, "object is missing; add it: label to detect"),
        ("detect", {"object": "cat", "image_url": "http://192.0.2.1/cat.jpg"}, 400, "data URL"),
        ("detect", {"object": "cat", "image_url": "data:image/png;base64,AAAA"}, 400, "not an image"),
        ("detect", {"object": "cat", "settings": {"conf": 2}}, 400, "conf"),
        ("detect", b"[" * 70_000, 400, "not JSON"),
        ("detect", b" " * (17 << 20), 413, "at most"),
    ],
)
def test_bad_input_gets_one_clear_line(
    finder: str, photo: Image.Image, path: str, change: Any, status: int, words: str
) -> None:
    body = change if isinstance(change, bytes) else {"image_url": data_url(photo), **change}
    answered, answer = post(f"{finder}/v1/{path}", body)
    assert (answered, list(answer)) == (status, ["error"])
    message = answer["error"]["message"]
    assert words in message
    assert "\n" not in message


def test_without_the_token_nothing_is_answered(finder: str, photo: Image.Image) -> None:
    body = {"image_url": data_url(photo), "object": "person"}
    assert [post(f"{finder}/v1/detect", body, token)[0] for token in (None, "wrong", TOKEN)] == [401, 401, 200]
