"""Simulated clients that connect and disconnect, and simulated webhook and MQTT servers that sometimes fail."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import websockets
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.contrib.media import MediaBlackhole

_PAUSE_S = 5.0  # between two visits of a kind, on average
_OFFLINE_S = 20.0  # how long a receiver is gone, at most
_ONLINE_S = 180.0  # how long it is there, on average


class Visits:
    """Simulates API clients for a soak test. On each visit, a client connects, uses the API and disconnects.

    Args:
        http, feed: URLs of the API and of the WebSocket feed.
        source: video source of the stream that clients add and remove.
        streams: names of the streams.
        seed: seed for the random order of the visits.
    """

    def __init__(self, http: str, feed: str, source: str, streams: list[str], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._http, self._feed, self._source, self._streams = http, feed, source, streams
        self._chance = random.Random(seed)

    async def run(self) -> None:
        """Simulate one API client after another, in random order, until the task is cancelled."""
        kinds: list[Callable[[httpx.AsyncClient], Awaitable[None]]] = [
            self.get,
            self.events,
            self.listen,
            self.stall,
            self.search,
            self.prompts,
            self.rules,
            self.stream,
            self.watch,
        ]
        await asyncio.gather(*(self._again(kind) for kind in kinds))

    async def _again(self, visit: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / _PAUSE_S))
            try:
                async with httpx.AsyncClient(timeout=60, trust_env=False) as session:
                    await visit(session)
                self.counts[visit.__name__] += 1
            except (httpx.HTTPError, websockets.WebSocketException, OSError, TimeoutError, ValueError):
                self.counts[f"{visit.__name__} failed"] += 1

    async def get(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that requests the metrics, the health status and an image."""
        name = self._chance.choice(self._streams)
        for path in ("/healthz", "/metrics", "/streams", f"/streams/{name}/counts", f"/streams/{name}/frame.jpg"):
            await _read(session, self._http + path)

    async def events(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that lists events, downloads the media of one event, and sometimes deletes the event."""
        found = (await session.get(self._http + "/events?limit=20")).json().get("events", [])
        if found:
            address = f"{self._http}/events/{self._chance.choice(found)['id']}"
            for path in ("", "/snapshot.jpg", "/clip.mp4"):
                await _read(session, address + path)
            if self._chance.random() < 0.25:
                await session.delete(address)

    async def listen(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that reads the WebSocket feed for 1 to 20 seconds."""
        async with websockets.connect(self._feed) as feed:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._chance.uniform(1, 20)):
                    async for _ in feed:
                        pass

    async def stall(self, session: httpx.AsyncClient) -> None:
        """Simulate a stalled client: connect to the WebSocket feed, read nothing, then disconnect."""
        reader, writer = await asyncio.open_connection(*_address(self._feed))
        writer.write(
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        await reader.read(100)
        await asyncio.sleep(self._chance.uniform(1, 20))
        writer.transport.abort()

    async def search(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that searches snapshots with the model. Half of the clients cancel the search."""
        headers = {"Accept": "text/event-stream"}
        async with session.stream("GET", self._http + "/events/search?q=person&limit=5", headers=headers) as response:
            given_up = self._chance.random() < 0.5
            async for _ in response.aiter_bytes():
                if given_up:
                    break

    async def prompts(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that changes the prompts of a stream."""
        name, more = self._chance.choice(self._streams), self._chance.choice((["cat"], ["dog", "chair"], []))
        await session.patch(f"{self._http}/streams/{name}", json={"detect": ["person", *more]})

    async def rules(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that changes the rules and zones of a stream."""
        name, right = self._chance.choice(self._streams), self._chance.uniform(0.5, 1)
        zones = {"zones": {"door": [0, 0, right, 0, right, 1, 0, 1]}}
        rules = {"rules": [{"name": "visitor", "when": "person in door for 1s"}, {"name": "any", "when": "person"}]}
        for path, body in (("zones", zones), ("rules", rules)):
            await session.put(f"{self._http}/streams/{name}/{path}", json=body)

    async def stream(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that adds and removes a stream."""
        body = {"name": "visitor", "source": self._source, "detect": ["person"], "track": True, "max_fps": 1}
        await session.post(self._http + "/streams", json=body)
        await asyncio.sleep(self._chance.uniform(5, 20))
        await session.delete(self._http + "/streams/visitor")
        await asyncio.sleep(30)

    async def watch(self, session: httpx.AsyncClient) -> None:
        """Simulate a client that watches the video of a stream over WebRTC."""
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        sink = MediaBlackhole()
        try:
            peer.addTransceiver("video", direction="recvonly")
            peer.on("track", sink.addTrack)
            await peer.setLocalDescription(await peer.createOffer())
            headers = {"Content-Type": "application/sdp"}
            address = f"{self._http}/whep/{self._chance.choice(self._streams)}"
            response = await session.post(address, content=peer.localDescription.sdp, headers=headers)
            response.raise_for_status()
            await peer.setRemoteDescription(RTCSessionDescription(response.text, "answer"))
            await sink.start()
            await asyncio.sleep(self._chance.uniform(2, 10))
        finally:
            await sink.stop()
            await peer.close()
        await asyncio.sleep(30)


@contextmanager
def visiting(visits: Visits) -> Iterator[None]:
    """Run simulated API clients in a thread until the `with` block ends."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(visits.run())

    def work() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        left = asyncio.all_tasks(loop)  # such as keepalives of feeds whose client was cancelled
        for one in left:
            one.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=work, name="soak clients")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answer a webhook request. One in twenty requests fails with an HTTP error."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(500 if random.random() < 0.05 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Suppress the request log of the web server."""


@contextmanager
def receiving() -> Iterator[str]:
    """Run a webhook server, and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.2,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def broker(folder: Path, port: int, seed: int) -> Iterator[bool]:
    """Run an MQTT broker that sometimes stops for up to 20 seconds. Yield False if mosquitto is not installed."""
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        yield False
        return
    settings = folder / "mosquitto.conf"
    settings.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n")
    ended, chance = threading.Event(), random.Random(seed)

    def work() -> None:
        while not ended.is_set():
            quiet = subprocess.DEVNULL
            process = subprocess.Popen([program, "-c", str(settings)], stdout=quiet, stderr=quiet)
            ended.wait(chance.expovariate(1 / _ONLINE_S))
            process.kill()
            process.wait()
            ended.wait(chance.uniform(1, _OFFLINE_S))

    thread = threading.Thread(target=work, name="soak broker")
    thread.start()
    try:
        yield True
    finally:
        ended.set()
        thread.join()


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.partition("://")[2].rstrip("/").partition(":")
    return host, int(port)


async def _read(session: httpx.AsyncClient, url: str) -> None:
    await session.get(url)
