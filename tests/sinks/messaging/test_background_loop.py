"""The loop of sinks that talk to servers, where a socket is closed before the loop watches it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from saccade.sinks.messaging.background_loop import SocketLoop
from tests.support.sinks.broker import LONG_S


def in_loop(work: Callable[[SocketLoop], Any]) -> None:
    with asyncio.Runner(loop_factory=SocketLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SocketLoop)
        runner.run(work(loop))


@pytest.mark.parametrize("asked", ["add_reader", "add_writer"])
@pytest.mark.parametrize("reused", [True, False])
def test_a_socket_that_breaks_at_once_blocks_no_later_one(asked: str, reused: bool) -> None:
    async def connect_twice(loop: SocketLoop) -> None:
        broken, other = socket.socketpair()
        number, called = broken.fileno(), []
        loop.call_soon_threadsafe(getattr(loop, asked), number, called.append, 1)
        broken.close()
        ends = os.pipe() if reused else ()  # another thread is given the number
        assert number in ends or not reused
        await asyncio.sleep(0.01)
        assert called == []
        for end in ends:
            os.close(end)
        later, peer = socket.socketpair()
        assert later.fileno() == number
        heard = asyncio.Event()
        loop.call_soon_threadsafe(loop.add_reader, number, heard.set)
        peer.send(b"answer")
        await asyncio.wait_for(heard.wait(), LONG_S)
        loop.remove_reader(number)
        for one in (later, peer, other):
            one.close()

    in_loop(connect_twice)


def test_aiomqtt_asks_as_the_loop_expects() -> None:
    """Or its sockets are watched without the check."""
    aiomqtt = pytest.importorskip("aiomqtt")
    asked = []

    class Noting(SocketLoop):
        def _watch(self, watch: Callable[..., object], *others: Any) -> None:
            asked.append(watch == self.add_reader)
            super()._watch(watch, *others)

    async def connect() -> None:
        listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(aiomqtt.MqttError):
            async with aiomqtt.Client("127.0.0.1", port, timeout=5):
                pass
        listening.close()

    with asyncio.Runner(loop_factory=Noting) as runner:
        runner.run(connect())
    assert True in asked
