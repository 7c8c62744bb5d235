"""An RTSP camera in Python whose replies and packets a test chooses, on 127.0.0.1 and a free port.

Packets go out interleaved, over UDP, by multicast or through an HTTP tunnel, as the client asks.
"""

from __future__ import annotations

import base64
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av

from tests.support.clips import numbered_image

STEP = 3600  # RTP units of one frame at 25 fps
SDP = "v=0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=control:track1\r\n"
LONG_S = 30
Unit = list[bytes]


def coded_frames(
    count: int, *, gop: int = 10, size: tuple[int, int] = (160, 120), codec: str = "libx264"
) -> list[Unit]:
    """The NAL units of a short stream of numbered images, frame by frame."""
    coder = av.CodecContext.create(codec, "w")
    coder.width, coder.height = size
    coder.pix_fmt, coder.framerate = "yuv420p", Fraction(25)
    coder.options = {"tune": "zerolatency", "preset": "ultrafast", "g": str(gop), "forced-idr": "1"}
    packets = []
    for number in range(count):
        packets += coder.encode(av.VideoFrame.from_ndarray(numbered_image(number % 256, *size), format="rgb24"))
    packets += coder.encode(None)
    return [[nal for nal in bytes(p).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if nal] for p in packets]


def without_parameter_sets(frames: list[Unit]) -> tuple[list[Unit], str]:
    """The same H.264 frames of slices alone, and the SDP attribute that holds their parameter sets."""
    sets = {nal[0] & 31: nal for unit in frames for nal in unit if nal[0] & 31 in (7, 8)}
    text = ",".join(base64.b64encode(sets[kind]).decode() for kind in (7, 8))
    slices = [[nal for nal in unit if 1 <= nal[0] & 31 <= 5] for unit in frames]
    return slices, f"a=fmtp:96 packetization-mode=1;sprop-parameter-sets={text}\r\n"


@dataclass
class Packetizer:
    """Numbers RTP packets; one NAL unit each, or fragments of 1400 bytes."""

    sequence: int = 65_530
    timestamp: int = 0
    ssrc: bytes = b"ssrc"
    payload_type: int = 96

    def packet(self, payload: bytes, marker: bool = False, payload_type: int | None = None) -> bytes:
        kind = self.payload_type if payload_type is None else payload_type
        head = bytes((0x80, 0x80 * marker | kind)) + (self.sequence % 65_536).to_bytes(2, "big")
        self.sequence += 1
        return head + (self.timestamp % (1 << 32)).to_bytes(4, "big") + self.ssrc + payload

    def frame(self, nals: Iterable[bytes], step: int = STEP) -> list[bytes]:
        """The packets of one frame; the clock moves on by `step` after it."""
        payloads: list[bytes] = []
        for nal in nals:
            pieces = [nal[at : at + 1400] for at in range(1, len(nal), 1400)] or [b""]
            for place, piece in enumerate(pieces):
                flags = 0x80 * (place == 0) | 0x40 * (place == len(pieces) - 1) | nal[0] & 31
                payloads.append(nal if len(pieces) == 1 else bytes((nal[0] & 0xE0 | 28, flags)) + piece)
        packets = [self.packet(payload, place == len(payloads) - 1) for place, payload in enumerate(payloads)]
        self.timestamp += step
        return packets


def sender_report(unix_s: float, timestamp: int, ssrc: bytes = b"ssrc") -> bytes:
    ntp = int((unix_s + 2_208_988_800) * (1 << 32))
    return b"\x80\xc8\0\6" + ssrc + ntp.to_bytes(8, "big") + timestamp.to_bytes(4, "big") + bytes(8)


@dataclass
class Request:
    method: str
    url: str
    headers: dict[str, str]


@dataclass
class Call:
    """One client's session, as its script sees it."""

    camera: ScriptedCamera
    write: Callable[[bytes], None]
    number: int
    hang_up: Callable[[], None] = lambda: None
    requests: list[Request] = field(default_factory=list)
    way: str = ""
    gone: threading.Event = field(default_factory=threading.Event)
    rtcp: list[bytes] = field(default_factory=list)
    udp: list[socket.socket] = field(default_factory=list)
    targets: list[tuple[str, int]] = field(default_factory=list)

    def send(self, *packets: bytes, rtcp: bool = False) -> None:
        for packet in packets:
            if self.way == "tcp":
                self.write(bytes((0x24, int(rtcp))) + len(packet).to_bytes(2, "big") + packet)
            else:
                self.udp[rtcp].sendto(packet, self.targets[rtcp])

    def wait(self, seconds: float) -> bool:
        """Wait; True when the client has gone."""
        return self.gone.wait(seconds) or self.camera.closed.is_set()

    def linger(self) -> None:
        """Stay connected until the client goes."""
        while not self.wait(0.05):
            pass

    def play(self, frames: Iterable[Unit], packetizer: Packetizer, interval_s: float = 0.0) -> None:
        """Send frames at an even pace."""
        due = time.monotonic()
        for unit in frames:
            self.send(*packetizer.frame(unit))
            due += interval_s
            if self.wait(max(0.0, due - time.monotonic())):
                return


Script = Callable[[Call], object]
Answer = Callable[[Call, Request], str | None]
"""Gives status line and headers (without CSeq) and a body, or None for the usual reply; "" for no reply at all."""


class ScriptedCamera:
    """Serves everyone who calls; `script` runs for each after PLAY, and hangs up when it returns.

    Args:
        script: what is sent.
        sdp: the description.
        answer: replies that differ from the usual ones.
        certificate: for TLS, certificate and key.
    """

    def __init__(
        self,
        script: Script,
        *,
        sdp: str = SDP,
        answer: Answer = lambda call, request: None,
        certificate: tuple[Path, Path] | None = None,
        port: int = 0,
    ) -> None:
        self.sdp, self.script, self.answer = sdp, script, answer
        self.calls: list[Call] = []
        self.closed = threading.Event()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
        if self._context and certificate:
            self._context.load_cert_chain(*certificate)
        self._listening = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listening.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.tunnel_status = "200 OK"
        self._tunnels: dict[str, socket.socket] = {}
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def url(self, path: str = "live", user: str = "", scheme: str = "rtsp") -> str:
        return f"{scheme}://{user}127.0.0.1:{self.port}/{path}"

    def close(self) -> None:
        self.closed.set()
        for one in (self._listening, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive() or one.ident is None] + [thread]
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listening.accept()
                self._sockets.append(accepted)
                self._start(self._serve, accepted)

    def _serve(self, accepted: socket.socket) -> None:
        with suppress(OSError):
            if self._context:
                accepted = self._context.wrap_socket(accepted, server_side=True)
                self._sockets.append(accepted)
            lock = threading.Lock()

            def write(data: bytes, to: socket.socket = accepted) -> None:
                with lock:
                    to.sendall(data)

            stream = accepted.makefile("rb")
            if stream.peek(4)[:4] == b"GET ":
                head = b"".join(iter(stream.readline, b"\r\n")).decode()
                self._tunnels[re.findall(r"(?i)x-sessioncookie: (\S+)", head)[0]] = accepted
                status = f"HTTP/1.0 {self.tunnel_status}\r\nContent-Type: application/x-rtsp-tunnelled\r\n\r\n"
                accepted.sendall(status.encode())
                return
            tunnel = stream.peek(5)[:5] == b"POST "
            if tunnel:
                head = b"".join(iter(stream.readline, b"\r\n")).decode()
                accepted = self._tunnels[re.findall(r"(?i)x-sessioncookie: (\S+)", head)[0]]
            call = Call(self, lambda data: write(data, accepted), len(self.calls), lambda: _hang_up(accepted))
            self.calls.append(call)
            try:
                self._converse(call, stream, tunnel)
            finally:
                call.gone.set()
                for one in call.udp:
                    one.close()
                if not tunnel:
                    stream.close()
                    accepted.close()
                    self._sockets.remove(accepted)

    def _converse(self, call: Call, stream: object, tunnel: bool) -> None:
        buffer = b""
        while True:
            data = stream.read1(65_536)  # type: ignore[attr-defined]
            if not data:
                return
            buffer += base64.b64decode(data) if tunnel else data
            while buffer:
                if buffer[:1] == b"$":
                    size = int.from_bytes(buffer[2:4], "big")
                    call.rtcp.append(buffer[4 : 4 + size])
                    buffer = buffer[4 + size :]
                    continue
                head, separator, rest = buffer.partition(b"\r\n\r\n")
                if not separator:
                    break
                buffer = rest
                first, *lines = head.decode().split("\r\n")
                if first.startswith("RTSP/"):
                    continue  # a reply to a request of ours
                method, url, _ = first.split(" ")
                headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
                self._reply(call, Request(method, url, headers))

    def _reply(self, call: Call, request: Request) -> None:
        call.requests.append(request)
        text = self.answer(call, request)
        if text == "":
            return
        usual = text is None
        head, body = "RTSP/1.0 200 OK", ""
        if text is not None:
            head, _, body = text.partition("\r\n\r\n")
        elif request.method == "DESCRIBE":
            body = self.sdp
        elif request.method == "SETUP":
            head += f"\r\nSession: 7;timeout=60\r\nTransport: {self._setup(call, request.headers['transport'])}"
        first, _, rest = head.partition("\r\n")
        rest = rest + "\r\n" if rest else ""
        cseq = request.headers["cseq"]
        call.write(f"{first}\r\nCSeq: {cseq}\r\n{rest}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        if request.method == "PLAY" and (usual or " 200 " in first):
            self._start(self._play, call)

    def _setup(self, call: Call, asked: str) -> str:
        call.way = "tcp" if "TCP" in asked else "udp"
        if call.way == "tcp":
            return "RTP/AVP/TCP;unicast;interleaved=0-1"
        call.udp = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        for one in call.udp:
            one.bind(("127.0.0.1", 0))
        if "multicast" in asked:
            for one in call.udp:
                one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            port = call.udp[0].getsockname()[1] // 2 * 2
            call.targets = [("239.255.77.7", port), ("239.255.77.7", port + 1)]
            return f"RTP/AVP;multicast;destination=239.255.77.7;port={port}-{port + 1};ttl=1"
        ports = re.findall(r"client_port=(\d+)-(\d+)", asked)[0]
        call.targets = [("127.0.0.1", int(port)) for port in ports]
        mine = "-".join(str(one.getsockname()[1]) for one in call.udp)
        return f"RTP/AVP;unicast;client_port={ports[0]}-{ports[1]};server_port={mine}"

    def _play(self, call: Call) -> None:
        with suppress(OSError):
            self.script(call)
            call.hang_up()


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
