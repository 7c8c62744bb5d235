from __future__ import annotations

import asyncio
import os
import socket

import pytest

pytest.importorskip("aiomqtt")
from saccade.sinks.messaging.mqtt_client import MqttClient
from tests.support.sinks.broker import LONG_S


@pytest.mark.parametrize("asked", ["_on_socket_open", "_on_socket_register_write"])
def test_a_socket_that_breaks_at_once_blocks_no_later_one(asked: str) -> None:
    async def connect_twice() -> None:
        loop = asyncio.get_running_loop()
        client = MqttClient("127.0.0.1")
        broken, other = socket.socketpair()
        number = broken.fileno()
        getattr(client, asked)(client._client, None, broken)
        broken.close()
        reading, writing = os.pipe()  # another thread is given the number
        assert number in (reading, writing)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.close(number)
        later, peer = socket.socketpair()
        assert later.fileno() == number
        heard = asyncio.Event()
        loop.add_reader(number, heard.set)
        peer.send(b"answer")
        await asyncio.wait_for(heard.wait(), LONG_S)
        loop.remove_reader(number)
        for one in (later, peer, other):
            one.close()
        os.close(writing if number == reading else reading)

    asyncio.run(connect_twice())
