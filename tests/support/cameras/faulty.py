"""A scripted camera on one port whose faults come and go."""

from __future__ import annotations

import random
import time
from fractions import Fraction
from pathlib import Path

import av

from tests.support.cameras.scripted import STEP, Call, Packetizer, Request, ScriptedCamera, Unit, sender_report

FAULTS = ("hang up", "freeze", "restart", "garbage", "loss", "jump", "goodbye", "no video")
"""`resize` is another one, for a camera that was given frames of another size."""


def coded_clip(path: Path, size: tuple[int, int], *, rate: int = 10, seconds: float = 6.0) -> list[Unit]:
    """The NAL units of a video file's begin, in another size and at another rate, with a key frame a second."""
    coder = av.CodecContext.create("libx264", "w")
    coder.width, coder.height = size
    coder.pix_fmt, coder.framerate = "yuv420p", Fraction(rate)
    coder.options = {"tune": "zerolatency", "preset": "ultrafast", "g": str(rate), "forced-idr": "1"}
    packets, due = [], Fraction(0)
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            if frame.time is None or frame.time < due:
                continue
            if frame.time > seconds:
                break
            due += Fraction(1, rate)
            image = frame.reformat(*size, format="yuv420p")
            image.pts, image.pict_type = None, av.video.frame.PictureType.NONE
            packets += coder.encode(image)
    packets += coder.encode(None)
    return [[nal for nal in bytes(p).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if nal] for p in packets]


class FaultyCamera:
    """Plays the same frames for ever to everyone who calls.

    Args:
        frames: what it plays.
        rate: how many frames a second.
        resized: what it plays instead with the fault `resize`; they begin with a key frame.
        clock: whether it reports its wall clock once a second; a frame's time is that at which it is due.
    """

    def __init__(
        self, frames: list[Unit], *, rate: int = 25, resized: list[Unit] | None = None, clock: bool = False
    ) -> None:
        self._clock = clock
        self.fault = ""
        self._frames, self._resized, self._rate = frames, resized or frames, rate
        self._camera = self._start(0)
        self.port = self._camera.port

    def suffer(self, fault: str, seconds: float) -> None:
        """Have a fault for so long; at the end all is well again."""
        self.fault = fault
        if fault == "restart":
            self._camera.close()
        time.sleep(seconds)
        if fault == "restart":
            self._camera = self._start(self.port)
        self.fault = ""

    def close(self) -> None:
        self._camera.close()

    def _start(self, port: int) -> ScriptedCamera:
        return ScriptedCamera(self._script, answer=self._answer, port=port)

    def _answer(self, call: Call, request: Request) -> str | None:
        self._camera.calls[:-8] = []  # or half an hour of calls would look like a leak
        return "" if self.fault == "freeze" else None

    def _script(self, call: Call) -> None:
        packetizer, due, number = Packetizer(), time.monotonic(), 0
        frames = self._frames
        while True:
            wanted = self._resized if self.fault == "resize" else self._frames
            if wanted is not frames:
                frames, number = wanted, 0
            captured_at, timestamp = time.time() - (time.monotonic() - due), packetizer.timestamp
            packets = packetizer.frame(frames[number % len(frames)], STEP * 25 // self._rate)
            number += 1
            due += 1 / self._rate
            if self.fault == "hang up":
                return
            if self.fault == "garbage":
                call.write(random.Random(number).randbytes(50))
            elif self.fault == "jump":
                packetizer.sequence += 5000
            elif self.fault == "goodbye":
                call.send(b"\x81\xcb\0\1ssrc", rtcp=True)
            if self.fault == "loss":
                packets = packets[1:]
            if self.fault not in ("freeze", "no video"):
                call.send(*packets)
            if self._clock and number % self._rate == 1:  # after its first frame, whose sender is known then
                call.send(sender_report(captured_at, timestamp), rtcp=True)
            if call.wait(max(0.0, due - time.monotonic())):
                return
