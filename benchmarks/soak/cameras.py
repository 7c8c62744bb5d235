"""RTSP server with simulated cameras and faults: `python -m benchmarks.soak.cameras CLIP STREAMS FPS [SEED]`.

The process prints its port. Camera N is rtsp://127.0.0.1:PORT/N over TCP and plays the clip in a loop. With a seed,
cameras disconnect, freeze, refuse connections, lose packets and change their frame size, each about once in three
minutes.
"""

from __future__ import annotations

import asyncio
import base64
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction

import av

Unit = list[bytes]
"""The NAL units of a frame."""

_CLOCK = 90_000
_PAYLOAD = 1400
_FAULT_S = 180.0  # between two faults of a camera, on average
_REPORT_S = 5.0  # between two RTCP sender reports
_SIZES = ((640, 360), (480, 270))


def coded(clip: str, fps: float, size: tuple[int, int]) -> list[Unit]:
    """Encode a clip as H.264 at the given frame rate. The first frame is a keyframe.

    Args:
        clip: video file.
        fps: frames per second, at most the frame rate of the clip.
        size: width and height of the frames in pixels.
    """
    encoder = av.CodecContext.create("libx264", "w")
    encoder.width, encoder.height = size
    encoder.pix_fmt, encoder.framerate, encoder.time_base = "yuv420p", Fraction(25), Fraction(1, 25)
    gop = max(1, round(2 * fps))
    encoder.options = {"tune": "zerolatency", "preset": "veryfast", "g": str(gop), "forced-idr": "1", "threads": "1"}
    packets: list[av.Packet[av.VideoStream]] = []
    with av.open(clip) as container:
        due, number = 0.0, 0
        for frame in container.decode(video=0):
            if (frame.time or 0.0) < due - 1e-3:
                continue
            due += 1 / fps
            scaled = frame.reformat(*size, format="yuv420p")
            scaled.pts, scaled.time_base, scaled.pict_type = number, encoder.time_base, av.video.frame.PictureType.NONE
            number += 1
            packets += encoder.encode(scaled)
    packets += encoder.encode(None)
    return [[nal for nal in bytes(p).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if nal] for p in packets]


@dataclass
class Camera:
    """A simulated camera with its current faults. All clients of the camera share its state.

    Attributes:
        loops: the encoded clip, once for each frame size.
        size: index of the current frame size in `loops`.
        frozen, refusing, losing: whether the camera is frozen, refuses connections, or loses packets.
        clients: open connections.
        faults: number of faults so far.
    """

    loops: list[list[Unit]]
    size: int = 0
    frozen: bool = False
    refusing: bool = False
    losing: bool = False
    faults: int = 0
    clients: set[asyncio.StreamWriter] = field(default_factory=set)

    async def fail(self, chance: random.Random) -> None:
        """Inject random faults until the task is cancelled."""
        while True:
            await asyncio.sleep(chance.expovariate(1 / _FAULT_S))
            fault = chance.choice(("hang up", "frozen", "refusing", "losing", "size"))
            self.faults += 1
            if fault == "hang up":
                self.hang_up()
            elif fault == "size":
                self.size = (self.size + 1) % len(self.loops)
                self.hang_up()  # as cameras restart when they are configured
            else:
                setattr(self, fault, True)
                if fault == "refusing":
                    self.hang_up()
                await asyncio.sleep(chance.uniform(5, 20))
                setattr(self, fault, False)

    def hang_up(self) -> None:
        """Close all client connections of the camera."""
        for client in self.clients:
            client.close()


class Server:
    """An RTSP server of simulated cameras. The URL path is the camera's number, such as `/0`.

    Args:
        cameras: simulated cameras to serve.
        fps: frames per second.
        chance: random generator that decides which packets are lost.
    """

    def __init__(self, cameras: list[Camera], fps: float, chance: random.Random) -> None:
        self._cameras = cameras
        self._fps = fps
        self._chance = chance

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one RTSP client until the client or the camera disconnects."""
        playing: asyncio.Task[None] | None = None
        camera: Camera | None = None
        try:
            while head := await _request(reader):
                method, url, *_ = head.split(" ", 2)
                path = url.partition("://")[2].partition("/")[2]
                camera = self._cameras[int(path.partition("/")[0] or 0)]
                if camera.refusing:
                    return
                camera.clients.add(writer)
                cseq = next(line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("cseq"))
                lines, body = [f"CSeq:{cseq}"], ""
                if method == "DESCRIBE":
                    body = _description(camera)
                    lines += ["Content-Type: application/sdp", f"Content-Length: {len(body)}"]
                elif method == "SETUP":
                    lines += ["Session: 1;timeout=60", "Transport: RTP/AVP/TCP;unicast;interleaved=0-1"]
                elif method == "OPTIONS":
                    lines += ["Public: DESCRIBE, SETUP, PLAY, GET_PARAMETER, TEARDOWN"]
                writer.write("\r\n".join(["RTSP/1.0 200 OK", *lines, "", body]).encode())
                await writer.drain()
                if method == "PLAY" and playing is None:
                    playing = asyncio.create_task(self._play(camera, writer))
                elif method == "TEARDOWN":
                    return
        except (OSError, ValueError, IndexError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            if camera is not None:
                camera.clients.discard(writer)
            if playing is not None:
                playing.cancel()
            writer.close()

    async def _play(self, camera: Camera, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await self._send(camera, writer)
        writer.close()

    async def _send(self, camera: Camera, writer: asyncio.StreamWriter) -> None:
        loop = camera.loops[camera.size]
        sequence, number = self._chance.randrange(1 << 16), 0
        begun, reported = time.monotonic(), float("-inf")
        while not writer.is_closing():
            stamp = round(number * _CLOCK / self._fps) % (1 << 32)
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                writer.write(_interleaved(1, _report(stamp)))
            for payload, last in _payloads(loop[number % len(loop)]):
                head = bytes((0x80, 0x80 * last | 96)) + sequence.to_bytes(2) + stamp.to_bytes(4) + b"soak"
                sequence = (sequence + 1) % (1 << 16)
                if not (camera.losing and self._chance.random() < 0.1):
                    writer.write(_interleaved(0, head + payload))
            await writer.drain()
            number += 1
            while camera.frozen:
                await asyncio.sleep(0.1)
                begun += 0.1
            await asyncio.sleep(max(0.0, begun + number / self._fps - time.monotonic()))


async def _request(reader: asyncio.StreamReader) -> str:
    """Read the next RTSP request, up to its blank line; return "" at the end of the connection. Skip RTCP packets."""
    while True:
        first = await reader.read(1)
        if first == b"$":
            size = int.from_bytes((await reader.readexactly(3))[1:])
            await reader.readexactly(size)
        elif not first:
            return ""
        else:
            return (first + await reader.readuntil(b"\r\n\r\n")).decode()


def _description(camera: Camera) -> str:
    sets = {nal[0] & 31: nal for nal in camera.loops[camera.size][0] if nal[0] & 31 in (7, 8)}
    text = ",".join(base64.b64encode(sets[kind]).decode() for kind in (7, 8))
    return (
        "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=soak\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"
        f"a=fmtp:96 packetization-mode=1;sprop-parameter-sets={text}\r\na=control:track1\r\n"
    )


def _payloads(unit: Unit) -> list[tuple[bytes, bool]]:
    """Yield the RTP payloads of a frame, each with a flag that is True for the last payload."""
    found: list[bytes] = []
    for nal in unit:
        if len(nal) <= _PAYLOAD:
            found.append(nal)
            continue
        pieces = [nal[at : at + _PAYLOAD] for at in range(1, len(nal), _PAYLOAD)]
        for place, piece in enumerate(pieces):
            flags = 0x80 * (place == 0) | 0x40 * (place == len(pieces) - 1) | nal[0] & 31
            found.append(bytes((nal[0] & 0xE0 | 28, flags)) + piece)
    return [(payload, place == len(found) - 1) for place, payload in enumerate(found)]


def _interleaved(channel: int, packet: bytes) -> bytes:
    return bytes((0x24, channel)) + len(packet).to_bytes(2) + packet


def _report(stamp: int) -> bytes:
    ntp = int((time.time() + 2_208_988_800) * (1 << 32))
    return b"\x80\xc8\0\6soak" + ntp.to_bytes(8) + stamp.to_bytes(4) + bytes(8)


async def main(clip: str, streams: int, fps: float, seed: int | None) -> None:
    """Serve the simulated cameras until the process ends."""
    loops = [coded(clip, fps, size) for size in (_SIZES if seed is not None else _SIZES[:1])]
    cameras = [Camera(loops) for _ in range(streams)]
    server = await asyncio.start_server(Server(cameras, fps, random.Random(seed)).serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    if seed is not None:
        await asyncio.gather(*(one.fail(random.Random(seed + place)) for place, one in enumerate(cameras)))
    await asyncio.Event().wait()


if __name__ == "__main__":
    given = sys.argv[1:]
    with suppress(KeyboardInterrupt):
        asyncio.run(main(given[0], int(given[1]), float(given[2]), int(given[3]) if len(given) > 3 else None))
