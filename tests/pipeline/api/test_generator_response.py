"""A client that leaves ends the generator of its response at once, whatever else has a reference to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from saccade.pipeline.api.generator_response import GeneratorResponse
from saccade.pipeline.api.server_sent_events import event_stream
from saccade.web.errors import HttpError


@pytest.mark.parametrize("version", ["2.0", "2.4"])  # from 2.4 on, `send` raises in place of a disconnect message
def test_a_client_that_leaves_closes_the_generator(version: str) -> None:
    closed: list[str] = []

    async def pieces() -> AsyncGenerator[str]:
        try:
            while True:
                yield "piece"
        finally:
            closed.append("closed")

    async def leave_after_three() -> None:
        texts, sent, left = pieces(), list[Any](), asyncio.Event()
        response = await event_stream(texts, lambda piece: {"text": piece}, list)

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 4:
                left.set()
                if version == "2.4":
                    raise OSError
                await asyncio.sleep(30)

        with nullcontext() if version == "2.0" else pytest.raises(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": version}}, receive, send)
        assert closed == ["closed"]  # while `texts` still refers to the generator
        assert [message.get("body") for message in sent[1:3]] == [b'data: {"text":"piece"}\n\n'] * 2
        await texts.aclose()

    asyncio.run(leave_after_three())


@pytest.mark.parametrize("before", [0, 2])
def test_an_error_before_the_first_value_is_an_error_of_the_response(before: int) -> None:
    async def pieces() -> AsyncGenerator[str]:
        for number in range(before):
            yield str(number)
        raise HttpError(503, "the model is loading")

    async def body() -> list[str]:
        response = await event_stream(pieces(), str, list)
        assert isinstance(response, GeneratorResponse)
        return [str(part) async for part in response.body_iterator]

    if not before:
        with pytest.raises(HttpError, match="the model is loading"):
            asyncio.run(body())
    else:
        error = 'data: {"error":{"message":"the model is loading","code":503}}\n\n'
        assert asyncio.run(body()) == ["data: 0\n\n", "data: 1\n\n", error]
