"""Chat completions, by OpenAI's own client."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from typing import Any, Literal

import pytest
from PIL import Image
from pydantic import BaseModel

from tests.pipeline.api.conftest import TOKEN
from tests.pipeline.api.test_moondream import data_url

pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="OpenAI's client is not installed")


def client_of(url: str, token: str = TOKEN) -> Any:
    from openai import OpenAI  # takes .7 s of CPU in each process that collects the tests

    return OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)


def about(question: str, *photos: Image.Image) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": data_url(photo)}} for photo in photos]
    return [{"role": "user", "content": [{"type": "text", "text": question}, *images]}]


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def test_a_question_is_answered_whole_and_streamed(talker: str, photo: Image.Image) -> None:
    chat = client_of(talker).chat.completions
    asked = {"model": "tiny", "messages": about("what is it?", photo), "max_tokens": 6}
    whole = chat.create(**asked)
    choice = whole.choices[0]
    assert (choice.message.role, choice.finish_reason, whole.usage.completion_tokens) == ("assistant", "length", 6)
    *chunks, last = chat.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert (chunks[-1].choices[0].finish_reason, last.usage) == ("length", whole.usage)


def test_stop_and_seed_hold(talker: str, photo: Image.Image) -> None:
    chat = client_of(talker).chat.completions
    asked = {"model": "tiny", "messages": about("what is it?", photo), "max_tokens": 6}
    text = chat.create(**asked).choices[0].message.content
    cut = chat.create(**asked, stop=[text[5:9]]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[:5], "stop")
    first, second = (chat.create(**asked, temperature=1.0, seed=3).choices[0].message.content for _ in range(2))
    assert first == second


def test_several_images_are_asked_about_as_one(talker: str, photo: Image.Image) -> None:
    chat = client_of(talker).chat.completions
    messages = [{"role": "system", "content": "Be brief."}, *about("what happens?", photo, photo, photo)]
    assert chat.create(model="tiny", messages=messages, max_tokens=3).choices[0].message.content


class Found(BaseModel):
    label: Literal["person", "cat"]
    bbox_2d: list[int]
    confidence: float


class Everything(BaseModel):
    found: list[Found]


def test_a_schema_of_boxes_gets_boxes(finder: str, photo: Image.Image) -> None:
    chat = client_of(finder).chat.completions
    answer = chat.parse(model="nano", messages=about("Find them.", photo), response_format=Everything)
    boxes = answer.choices[0].message.parsed.found
    assert [box.label for box in boxes] == ["person", "person"]
    for box in boxes:
        x1, y1, x2, y2 = box.bbox_2d
        assert 1 < x1 < x2 <= photo.width
        assert 1 < y1 < y2 <= photo.height


class Door(BaseModel):
    state: Literal["öpen", 'clo"sed', "ajar"]


def test_a_choice_has_a_probability_for_each(talker: str, photo: Image.Image) -> None:
    chat = client_of(talker).chat.completions
    asked = {"model": "tiny", "messages": about("How is the door?", photo), "logprobs": True, "top_logprobs": 5}
    answer = chat.parse(**asked, response_format=Door)
    choice = answer.choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    assert [token.logprob for token in tokens[::2]] == [0, 0]
    ranked = tokens[1].top_logprobs
    assert {json.loads(f'"{one.token}"') for one in ranked} == {"öpen", 'clo"sed', "ajar"}
    assert [one.logprob for one in ranked] == sorted((one.logprob for one in ranked), reverse=True)
    assert sum(math.exp(one.logprob) for one in ranked) == pytest.approx(1)
    assert (tokens[1].token, tokens[1].logprob) == (ranked[0].token, ranked[0].logprob)
    assert json.loads(f'"{tokens[1].token}"') == choice.message.parsed.state
    assert bytes(tokens[1].bytes).decode() == tokens[1].token
    assert answer.usage.prompt_tokens > 1


def test_a_choice_is_streamed_with_its_probability(talker: str, photo: Image.Image) -> None:
    chat = client_of(talker).chat.completions
    schema = schema_of({"enum": ["yes", "no"]})
    asked = {"model": "tiny", "messages": about("Is it?", photo), "response_format": schema}
    whole = chat.create(**asked, logprobs=True).choices[0]
    first, last = (chunk.choices[0] for chunk in chat.create(**asked, logprobs=True, stream=True))
    assert (first.delta.content, first.logprobs.model_dump()) == (whole.message.content, whole.logprobs.model_dump())
    assert (whole.message.content in ('"yes"', '"no"'), last.finish_reason) == (True, "stop")
    assert chat.create(**asked).choices[0].logprobs is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "nano can detect and point, not query"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "no image found"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n:"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: function calling is not supported"),
        ({"response_format": {"type": "json_object"}}, "schema of boxes"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "array of boxes",
        ),
        ({"response_format": schema_of({"type": "string", "enum": []})}, "have 1 to 64 values"),
        ({"response_format": schema_of({"enum": ["a", 1]})}, "should be a list of non-empty strings"),
        ({"response_format": schema_of({"enum": ["yes", "no"]})}, "nano can detect and point, not query"),
        ({"logprobs": True}, "supported only for a choice"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ],
)
def test_what_it_cannot_is_one_clear_error(finder: str, photo: Image.Image, change: dict[str, Any], words: str) -> None:
    from openai import BadRequestError

    asked = {"model": "nano", "messages": about("What is this?", photo), **change}
    with pytest.raises(BadRequestError) as error:
        client_of(finder).chat.completions.create(**asked)
    assert words in error.value.body["message"]


def test_models_are_listed_and_tokens_checked(finder: str, talker: str) -> None:
    from openai import AuthenticationError

    assert [model.id for model in client_of(finder).models.list()] == ["nano"]
    assert [model.id for model in client_of(talker).models.list()] == ["nano", "tiny"]
    with pytest.raises(AuthenticationError):
        client_of(finder, "wrong").models.list()
