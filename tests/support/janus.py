"""Debian's Janus, a WebRTC server. It publishes a camera to a WHIP endpoint, over a link that may lose packets."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import av
import httpx
import numpy as np
import pytest
from aiortc.codecs.h264 import H264Encoder
from aiortc.rtp import RTCP_PSFB_PLI, RtcpPacket, RtcpPsfbPacket, RtcpSenderInfo, RtcpSrPacket, RtpPacket
from numpy.typing import NDArray

from tests.support.cameras import GREY, free_port, wait_for

JANUS = shutil.which("janus")
LONG_S = 20  # far beyond what any of these needs; only so that a hang fails

needs_janus = pytest.mark.skipif(
    JANUS is None and "CI" not in os.environ, reason="Janus is not installed: apt-get install janus"
)

_UNUSED = "audiobridge,duktape,echotest,lua,nosip,recordplay,sip,textroom,videocall,videoroom,voicemail"
_CONFIG = 'plugins: {{ disable = "{}" }}\n'.format(re.sub(r"\w+", r"libjanus_\g<0>.so", _UNUSED))
_CANDIDATE = re.compile(r"^a=candidate:.* (\d+\.\d+\.\d+\.\d+) (\d+) typ host", re.MULTILINE)


class Link:
    """Two UDP ports between Saccade and Janus. What arrives at one leaves from the other.

    Attributes:
        loss: the share of the RTP and RTCP packets to lose, from 0 to 1.
        lost: the number of packets lost.
    """

    def __init__(self) -> None:
        self.loss = 0.0
        self.lost = 0
        self._random = random.Random(36)
        self._ends = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        self._peers: list[tuple[str, int]] = []
        self._threads = [threading.Thread(target=self._carry, args=(end,)) for end in range(2)]

    def offer(self, sdp: str) -> str:
        """Return Janus's SDP offer with the link's address instead of Janus's."""
        return self._replaced(sdp, 0, "127.0.0.1")

    def answer(self, sdp: str) -> str:
        """Return Saccade's SDP answer with the link's address instead of Saccade's. From here on, packets pass."""
        # Janus sends only through the interface of its own address, which is not the loopback.
        replaced = self._replaced(sdp, 1, self._peers[0][0])
        for thread in self._threads:
            thread.start()
        return replaced

    def close(self) -> None:
        for end, thread in zip(self._ends, self._threads, strict=True):
            if thread.ident:
                end.sendto(b"", end.getsockname())
                thread.join()
            end.close()

    def _replaced(self, sdp: str, end: int, host: str) -> str:
        found = _CANDIDATE.search(sdp)
        assert found is not None, sdp
        self._peers.append((found[1], int(found[2])))
        self._ends[end].bind((host, 0))
        line = "a=candidate:1 1 udp 2015363327 {} {} typ host\r\n".format(*self._ends[end].getsockname())
        return re.sub(r"(^a=candidate:.*\r\n)+", line, sdp, flags=re.MULTILINE)

    def _carry(self, end: int) -> None:
        """Pass on what arrives at an end: from Saccade at the first, from Janus at the second."""
        while data := self._ends[end].recv(2048):
            if 128 <= data[0] < 192 and self._random.random() < self.loss:  # RTP or RTCP; neither DTLS nor STUN
                self.lost += 1
            else:
                self._ends[1 - end].sendto(data, self._peers[end])


class Janus:
    """A running Janus, with its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        assert JANUS is not None, "CI needs Janus"
        port = free_port()
        (folder / "janus.jcfg").write_text(_CONFIG)
        (folder / "janus.transport.http.jcfg").write_text(
            f'general: {{ http = true ip = "127.0.0.1" port = {port} }}\n'
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/janus", timeout=LONG_S)
        self._numbers = itertools.count(1)
        self._log = folder / "janus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen([JANUS, "--configs-folder=."], cwd=folder, stdout=log, stderr=log)
        wait_for(self._listens, LONG_S)

    def close(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()

    @contextmanager
    def mountpoint(self, **settings: Any) -> Iterator[Mountpoint]:
        """A video source of the streaming plugin, with these settings of its "create" request, during the block."""
        session = f"/{self.ask('', 'create')['data']['id']}"
        plugin = f"{session}/{self.ask(session, 'attach', plugin='janus.plugin.streaming')['data']['id']}"
        created = self.ask(plugin, "message", body={"request": "create", "id": 1, **settings})
        try:
            yield Mountpoint(self, plugin, created["plugindata"]["data"]["stream"].get("ports", []))
        finally:
            self.ask(plugin, "message", body={"request": "destroy", "id": 1})
            self.ask(session, "destroy")

    def ask(self, path: str, request: str, **fields: Any) -> dict[str, Any]:
        """Send a request of the Janus API, and return its response, which may be an event."""
        number = str(next(self._numbers))
        got = self._http.post(path, json={"janus": request, "transaction": number, **fields}).json()
        while got["janus"] == "ack" or got.get("transaction") != number:
            got = self._http.get(path.rpartition("/")[0]).json()
        assert got["janus"] in ("success", "event"), got
        assert "error" not in got.get("plugindata", {}).get("data", {}), got
        answer: dict[str, Any] = got
        return answer

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return self._http.get("/info").is_success
        except httpx.TransportError:
            return False


class Mountpoint:
    """A video source of Janus's streaming plugin.

    Attributes:
        ports: the ports that Janus has opened for RTP, of each medium.
    """

    def __init__(self, janus: Janus, plugin: str, ports: list[dict[str, Any]]) -> None:
        self.ports = ports
        self._janus = janus
        self._plugin = plugin

    @contextmanager
    def publishing(self, url: str) -> Iterator[Link]:
        """Publish the video to the WHIP endpoint at `url` for as long as the block lasts.

        Janus has no WHIP client. This one carries its SDP offer to the endpoint, and the answer back.
        """
        with closing(Link()) as link:
            offer = self._janus.ask(self._plugin, "message", body={"request": "watch", "id": 1})["jsep"]["sdp"]
            headers = {"Content-Type": "application/sdp"}
            answer = httpx.post(url, content=link.offer(offer), headers=headers, timeout=LONG_S)
            assert answer.status_code == 201, answer.text
            jsep = {"type": "answer", "sdp": link.answer(answer.text)}
            self._janus.ask(self._plugin, "message", body={"request": "start"}, jsep=jsep)
            yield link


class RtpSender:
    """Sends 25 H.264 frames a second by RTP, as `Watcher` expects them. Only a PLI makes a second keyframe.

    Args:
        rtp: the port for RTP.
        rtcp: the port for RTCP.

    Attributes:
        number: of the frame that is sent next.
        requests: the number of PLIs received.
    """

    def __init__(self, rtp: int, rtcp: int) -> None:
        self.number = 0
        self.requests = 0
        self._rtp = ("127.0.0.1", rtp)
        self._rtcp = ("127.0.0.1", rtcp)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _send(self) -> None:
        encoder, sequence = H264Encoder(), itertools.count()
        begun = time.monotonic()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            while not self._over.wait(max(0.0, begun + self.number / 25 - time.monotonic())):
                now = time.time()
                frame = av.VideoFrame.from_ndarray(_image(int(now * 1000) & 0xFFFFFFFF, self.number), format="rgb24")
                frame.pts, frame.time_base = self.number * 3600, Fraction(1, 90000)
                packets, timestamp = encoder.encode(frame, self._asked(out))
                for at, data in enumerate(packets, 1):
                    packet = RtpPacket(96, int(at == len(packets)), next(sequence), timestamp, ssrc=36)
                    packet.payload = data
                    out.sendto(packet.serialize(), self._rtp)
                sent = RtcpSenderInfo(int((now + 2208988800) * 2**32), timestamp, self.number, 0)
                out.sendto(bytes(RtcpSrPacket(36, sent)), self._rtcp)
                self.number += 1

    def _asked(self, out: socket.socket) -> bool:
        """Whether a PLI has arrived."""
        before = self.requests
        with suppress(BlockingIOError):
            while True:
                feedback = [one for one in RtcpPacket.parse(out.recv(2048)) if isinstance(one, RtcpPsfbPacket)]
                self.requests += sum(one.fmt == RTCP_PSFB_PLI for one in feedback)
        return self.requests > before


def _image(clock_ms: int, number: int) -> NDArray[np.uint8]:
    """An image with a clock and a number in its top rows, as those of `rtsp_server.py`."""
    image = np.full((360, 640, 3), GREY, np.uint8)
    for top, value in ((0, clock_ms), (20, number)):
        image[top : top + 20] = np.repeat([value >> bit & 1 for bit in range(32)], 20)[:, None] * 255
    return image
