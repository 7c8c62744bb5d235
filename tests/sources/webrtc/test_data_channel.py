from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection

from saccade.sources.webrtc.data_channel import LABEL, MAX_TEXT, Messages
from tests.support.webrtc import LOOPBACK, own_loop, until


class Pair:
    """Our side of a connection, and a peer's channel to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, label: str = LABEL) -> None:
        self.loop = loop
        self.came: list[Any] = []
        self.do(self._connect(label))

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def say(self, text: Any) -> None:
        self.loop.call_soon_threadsafe(self.channel.send, text)

    def fall_silent(self) -> None:
        """Read and send nothing any more, as a page in a frozen browser does."""

        async def cut() -> None:
            for protocol in self.peer.sctp.transport.transport.iceGatherer._connection._protocols:
                protocol.transport.pause_reading()
                protocol.transport.sendto = lambda data, address=None: None

        self.do(cut())

    async def _connect(self, label: str) -> None:
        self.ours, self.peer = (RTCPeerConnection(RTCConfiguration(iceServers=[])) for _ in range(2))
        self.messages = Messages()
        self.messages.listen(self.ours)
        self.channel = self.peer.createDataChannel(label)
        self.channel.on("message", self.came.append)
        gathering: Any = self.peer.sctp.transport.transport.iceGatherer._connection
        gather = gathering.get_component_candidates
        gathering.get_component_candidates = lambda component, addresses, timeout=5: gather(
            component=component, addresses=list(LOOPBACK), timeout=timeout
        )
        await self.peer.setLocalDescription(await self.peer.createOffer())
        await self.ours.setRemoteDescription(self.peer.localDescription)
        await self.ours.setLocalDescription(await self.ours.createAnswer())
        await self.peer.setRemoteDescription(self.ours.localDescription)

    async def close(self) -> None:
        await asyncio.gather(self.ours.close(), self.peer.close())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with own_loop() as running:
        yield running


def test_texts_go_out_and_answers_come_back(loop: asyncio.AbstractEventLoop) -> None:
    pair = Pair(loop)
    try:
        pair.messages.answer = lambda text: f"you stated {text}" if text != "hush" else None
        pair.messages.send("first")  # waits for the channel
        until(lambda: pair.came == ["first"])
        for text in ("hello", "hush", b"bytes", "x" * (MAX_TEXT + 1), "bye"):
            pair.say(text)
        until(lambda: pair.came[-1] == "you stated bye")
        assert pair.came[1:] == ["you stated hello", "you stated bye"]
    finally:
        pair.do(pair.close())


def test_other_channels_are_closed(loop: asyncio.AbstractEventLoop) -> None:
    pair = Pair(loop, label="chat")
    try:
        until(lambda: pair.channel.readyState == "closed")
        assert not pair.messages.open
        pair.messages.send("nobody hears this")
    finally:
        pair.do(pair.close())


def test_a_peer_that_reads_nothing_costs_no_memory(loop: asyncio.AbstractEventLoop) -> None:
    pair = Pair(loop)
    try:
        until(lambda: pair.messages.open)
        pair.fall_silent()
        channel = pair.messages._channel
        for number in range(3000):
            pair.messages.send(f"{number:05}" + "x" * 20_000)
        until(lambda: pair.messages._newest and pair.messages._newest[0].startswith("02999"))
        assert channel.bufferedAmount <= 2 * 20_005
        assert len(channel.transport._outbound_queue) < 100
    finally:
        pair.do(pair.close())


def test_without_a_peer_texts_go_nowhere() -> None:
    messages = Messages()
    messages.send("nobody is there")
    assert not messages.open
