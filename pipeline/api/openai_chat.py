"""OpenAI's chat completions API, for OpenAI's client and for programs such as Frigate and live-vlm-webui.

    POST /v1/chat/completions   {"model": …, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,…"}}]}]}

The texts of all messages are joined into one question. Several images are combined into one image grid.

`response_format` accepts two kinds of JSON schema. With a schema of boxes (`box_schema`), the response contains
detections. With a schema of choices (`choice_schema`), the response contains one of the choices. `logprobs` and
`top_logprobs` add the probabilities of the choices.

`stream`, `max_tokens`, `temperature` (default 0), `top_p`, `stop` and `seed` are supported. A request with an
unsupported feature is rejected.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from starlette.responses import Response

from saccade.engine.errors import EngineError
from saccade.engine.results import Text
from saccade.engine.tasks import Detect, Point, Query
from saccade.pipeline.api.asker import Asker, Engines, ModelRoute, as_http
from saccade.pipeline.api.box_schema import BoxSchema
from saccade.pipeline.api.choice_schema import ChoiceSchema
from saccade.pipeline.api.images import MAX_IMAGES, contact_sheet, decode_image
from saccade.pipeline.api.routes import Json, Routes, bad_values
from saccade.pipeline.api.server_sent_events import event_stream
from saccade.pipeline.settings import NullIsUnset
from saccade.sources.frame import RgbImage
from saccade.web.errors import HttpError

MAX_TOKENS = 768


class TextPart(NullIsUnset):
    """The text part of a chat message."""

    type: Literal["text"]
    text: str


class ImageUrl(NullIsUnset):
    """An image of a chat message, as a data URL."""

    url: str


class ImagePart(NullIsUnset):
    """The image part of a chat message."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _part_type(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


_Part = Annotated[Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image_url")], Discriminator(_part_type)]


class Message(NullIsUnset):
    """A chat message. Its content is a text, or a list of text parts and image parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        """The text of the message. Several text parts are joined by newlines."""
        parts = self.content if isinstance(self.content, list) else []
        return self.content if isinstance(self.content, str) else "\n".join(p.text for p in parts if p.type == "text")

    @property
    def images(self) -> list[str]:
        """The data URLs of the images in the message."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if part.type == "image_url"]


class JsonSchema(NullIsUnset):
    """The JSON schema that the answer must match."""

    schema_: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(NullIsUnset):
    """The format of the answer: free text, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StreamOptions(NullIsUnset):
    """The options of a response that is streamed in chunks."""

    include_usage: bool = False


class Chat(NullIsUnset):
    """A chat completion request. Fields that have no effect, such as `user`, are ignored."""

    messages: list[Message] = Field(min_length=1, max_length=256)
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=4096)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    response_format: ResponseFormat | None = None
    tools: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("tools")
    @classmethod
    def _without_tools(cls, value: object) -> object:
        if value:
            raise ValueError("function calling is not supported: remove tools from the request")
        return value

    @model_validator(mode="after")
    def _with_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


routes = Routes("v1", ModelRoute)


@routes.post("/v1/chat/completions", role="operator", limited="always")
async def complete(chat: Chat, engines: Engines) -> Response:
    """Return a chat completion, as one response or as a stream of chunks."""
    image, images = await _image(engines.finding, chat)
    wanted = chat.response_format
    schema = wanted.json_schema.schema_ if wanted and wanted.type == "json_schema" and wanted.json_schema else None
    with bad_values(400, "response_format: "):
        choice = None if schema is None else ChoiceSchema.of(schema)
    if chat.logprobs and choice is None:
        raise HttpError(
            400,
            'logprobs: supported only for a choice; give a JSON schema with an enum, such as {"enum": ["yes", "no"]}',
        )
    finds = schema is not None and choice is None
    answer = _Answer(chat, (engines.finding if finds else engines.talking).model_name)
    if choice is not None:
        pieces = await _chosen(engines.talking, chat, choice, image, answer)
    elif schema is not None:
        pieces = await _boxes(engines.finding, chat, schema, image, images)
    elif wanted and wanted.type == "json_object":
        raise HttpError(
            400, "response_format json_object is not supported: use json_schema with a schema of boxes or of one choice"
        )
    else:
        task = _query(chat)
        answer.prompt_tokens = _prompt_tokens(engines.talking, task)
        pieces = engines.talking.pieces(image, task, lambda result: answer.take(result.texts[0]))
    if chat.stream:
        return await event_stream(pieces, answer.chunk, answer.end)
    async with aclosing(pieces):
        text = "".join([piece async for piece in pieces])
    return Json(answer.whole(text))


async def _image(asker: Asker, chat: Chat) -> tuple[RgbImage, int]:
    """Return the image of a chat request, and the number of images. Several images become one image grid."""
    urls = [url for message in chat.messages for url in message.images]
    if not urls:
        raise HttpError(400, "messages: no image found; add a part of type image_url with a data URL")
    if len(urls) > MAX_IMAGES:
        raise HttpError(400, f"messages: at most {MAX_IMAGES} images, got {len(urls)}")
    image = await asker.decode(lambda: contact_sheet([decode_image(url) for url in urls]))
    return image, len(urls)


def _prompt_tokens(asker: Asker, task: Query) -> int:
    try:
        return asker.engine.prompt_tokens(task)
    except EngineError as error:
        raise as_http(error) from None


async def _chosen(
    asker: Asker, chat: Chat, schema: ChoiceSchema, image: RgbImage, answer: _Answer
) -> AsyncGenerator[str]:
    task = _query(chat, schema.choices)
    answer.prompt_tokens = _prompt_tokens(asker, task)
    text = (await asker.result(image, [task])).texts[0]
    answer.take(text)
    if chat.logprobs:
        answer.logprobs = schema.logprobs(text, chat.top_logprobs or 0)
    return _one(schema.answer(text.text))


async def _boxes(asker: Asker, chat: Chat, schema: dict[str, Any], image: RgbImage, images: int) -> AsyncGenerator[str]:
    if images > 1:
        raise HttpError(400, "boxes need exactly one image per request")
    with bad_values(400, "response_format: "):
        boxes = BoxSchema.of(schema)
    labels = boxes.labels or [_question(chat)]
    kind = Point if boxes.points else Detect
    result = await asker.result(image, [kind(label) for label in labels])
    return _one(json.dumps(boxes.answer(result)))


class _Answer:
    """Formats a chat completion as one JSON response, or as JSON chunks of a streamed response."""

    def __init__(self, chat: Chat, model: str) -> None:
        self._chat = chat
        self._about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._begun = False
        self._text: Text | None = None
        self.prompt_tokens: int | None = None
        self.logprobs: dict[str, Any] | None = None

    def take(self, text: Text) -> None:
        """Store the complete text result, which contains the token counts."""
        self._text = text

    def whole(self, text: str) -> dict[str, Any]:
        """Return the complete JSON response with a generated text."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": self.logprobs, "finish_reason": self._reason}
        return {**self._about, "object": "chat.completion", "choices": [choice], "usage": self._usage}

    def chunk(self, piece: str) -> dict[str, Any]:
        """Return the JSON chunk for a piece of the generated text."""
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        delta = {**role, "content": piece}
        return self._chunk([{"index": 0, "delta": delta, "logprobs": self.logprobs, "finish_reason": None}])

    def end(self) -> list[Any]:
        """Return the last chunks of a streamed response, such as the finish reason and `[DONE]`."""
        last: list[Any] = [self._chunk([{"index": 0, "delta": {}, "finish_reason": self._reason}])]
        if self._chat.stream_options and self._chat.stream_options.include_usage:
            last.append({**self._chunk([]), "usage": self._usage})
        return [*last, "[DONE]"]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._about, "object": "chat.completion.chunk", "choices": choices}

    @property
    def _reason(self) -> str:
        return "length" if self._text and self._text.cut else "stop"

    @property
    def _usage(self) -> dict[str, int] | None:
        """The numbers of prompt tokens (including image tokens) and of generated tokens. None for detections."""
        if self.prompt_tokens is None or self._text is None:
            return None
        total = self.prompt_tokens + self._text.tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._text.tokens,
            "total_tokens": total,
        }


async def _one(text: str) -> AsyncGenerator[str]:
    yield text


def _question(chat: Chat) -> str:
    text = "\n".join(message.text.strip() for message in chat.messages if message.text.strip())
    if not text:
        raise HttpError(400, "messages: no text found; add a question")
    return text


def _query(chat: Chat, choices: tuple[str, ...] = ()) -> Query:
    stop = [chat.stop] if isinstance(chat.stop, str) else chat.stop or []
    with bad_values(400):
        return Query(
            _question(chat),
            chat.max_completion_tokens or chat.max_tokens or MAX_TOKENS,
            temperature=chat.temperature or 0.0,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            stop=tuple(stop),
            seed=chat.seed,
            choices=choices,
        )
