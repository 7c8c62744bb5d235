"""`saccade probe` on scripted cameras: transport, key frames, loss, clock, and what to change."""

from __future__ import annotations

import json
import time

from saccade.pipeline.cli.commands.probe import examine
from tests.support.cameras.scripted import Call, Packetizer, ScriptedCamera, coded_frames, sender_report

FRAMES = coded_frames(60, gop=20)
LASTING = [*FRAMES[1:], *FRAMES * 20]  # what follows the first, for longer than a probe takes on a busy machine


def test_a_good_camera_gets_no_advice() -> None:
    def script(call: Call) -> None:
        packetizer = Packetizer()
        call.send(*packetizer.frame(FRAMES[0]))
        call.send(sender_report(time.time(), packetizer.timestamp), rtcp=True)
        call.play(LASTING, packetizer, 0.02)
        call.linger()

    with ScriptedCamera(script) as camera:
        probed = examine(camera.url(), seconds=1.0, hwaccel="none", transport="auto", out=None)
    assert probed.transport == "tcp"
    assert probed.key_interval_s == 0.8
    assert probed.clock_off_s is not None
    assert abs(probed.clock_off_s) < 1
    assert probed.advice == []
    assert "over tcp; keyframes every 0.8 s; camera clock (RTCP) off by" in probed.as_text()


def test_loss_and_a_wrong_clock_come_with_advice() -> None:
    def script(call: Call) -> None:
        packetizer = Packetizer()
        call.send(*packetizer.frame(FRAMES[0]))
        call.send(sender_report(time.time() - 3600, packetizer.timestamp), rtcp=True)
        for number, unit in enumerate(LASTING):
            packets = packetizer.frame(unit)
            call.send(*(packets[1:] if number == 5 else packets))
            if call.wait(0.02):
                return
        call.linger()

    with ScriptedCamera(script) as camera:
        probed = examine(camera.url(), seconds=1.2, hwaccel="none", transport="udp", out=None)
    advice = json.loads(probed.as_json())["advice"]
    assert "set rtsp_transport: tcp" in advice[0]
    assert "set the camera's NTP server" in advice[1]
