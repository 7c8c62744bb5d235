from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from typing import Any

import pytest
from aiortc import RTCPeerConnection, RTCSessionDescription

from saccade.pipeline.api.whep_peer import ViewerPeer
from saccade.sources.webrtc.peer import PeerSettings
from saccade.sources.webrtc.signaling import MAX_OFFER_BYTES
from tests.support.webrtc import Publisher, leaving_no_thread, until
from tests.support.whep import HEIGHT, WIDTH, Stage, Watcher, staging, watching

TOKEN = "sesame"


@pytest.mark.parametrize(("codecs", "sent"), [(("VP8", "H264"), "H264"), (("VP8",), "VP8")])
def test_a_viewer_sees_the_newest_frames(codecs: tuple[str, ...], sent: str) -> None:
    with leaving_no_thread(), staging() as stage:
        with watching(stage, codecs=codecs) as watcher:
            until(lambda: len(watcher.numbers) >= 30)
            (peer,) = stage.whep._peers.values()
            assert peer is not None
            assert peer.codec == sent
        assert watcher.sizes == {(WIDTH, HEIGHT)}
        steps = [(b - a) % 256 for a, b in itertools.pairwise(watcher.numbers)]
        assert all(0 < step < 10 for step in steps)  # in order, hardly one left out
        until(lambda: stage.whep.n_open == 0)
        assert stage.videos._streams["door"]._renditions == {}  # and nothing is coded any more


def test_each_record_comes_with_the_timestamp_of_its_own_frame() -> None:
    with staging() as stage, watching(stage, "?overlay=off") as watcher:
        until(lambda: len(watcher.records) >= 20 and len(watcher.times) >= 20)
        assert watcher.records[0]["schema"] == "saccade/2"
        stamps = {record["frame"]: record["rtp_timestamp"] for record in watcher.records}
        times = dict(zip(watcher.numbers, watcher.times, strict=False))
        both = stamps.keys() & times.keys()
        assert len(both) >= 10
        # The viewer's clock starts at its first frame: it is as far behind each timestamp.
        assert len({(stamps[number] - times[number]) % 2**32 for number in both}) == 1


def test_the_first_record_does_not_wait_for_a_second_frame() -> None:
    with staging() as stage:
        stage.stop_feeding()
        with watching(stage) as watcher:
            stage.write(10_000)
            until(lambda: watcher.records)
            assert [record["frame"] for record in watcher.records] == [10_000]


def test_several_watch_and_leave_as_they_like() -> None:
    with staging() as stage, watching(stage) as stays:
        until(lambda: stays.numbers)
        for _ in range(3):
            with watching(stage) as viewer:
                until(lambda viewer=viewer: len(viewer.numbers) >= 5)  # a key frame is made for it
            assert stage.ask("DELETE", viewer.location)[0] in (200, 404)
        before = len(stays.numbers)
        until(lambda: len(stays.numbers) > before + 5)
        assert stage.whep.n_open == 1
        assert stage.ask("DELETE", stays.location)[0] == 200
        assert stage.whep.n_open == 0


def test_a_lost_frame_brings_a_key_frame() -> None:
    with staging() as stage, watching(stage) as watcher:
        until(lambda: len(watcher.numbers) >= 10)
        (peer,) = stage.whep._peers.values()
        assert peer is not None
        viewer = peer._track.viewer
        assert viewer is not None
        receiver = watcher.connection.getReceivers()[0]
        asked: list[Any] = []
        ask = viewer.request_key_frame
        viewer.request_key_frame = lambda: (asked.append(True), ask())[1]  # type: ignore[method-assign]
        stage.do(receiver._send_rtcp_pli(peer._sender._ssrc))
        until(lambda: asked)
        before = len(watcher.numbers)
        until(lambda: len(watcher.numbers) > before + 5 and not viewer.needs_key_frame)


def test_a_viewer_that_loses_packets_gets_a_lower_bit_rate() -> None:
    with staging() as stage, watching(stage) as stays, watching(stage) as loses:
        until(lambda: len(stays.numbers) >= 10 and len(loses.numbers) >= 10)
        peers = [peer for peer in stage.whep._peers.values() if peer is not None]
        transport: Any = loses.connection.getReceivers()[0].transport
        take, count = transport._handle_rtp_data, itertools.count()

        async def drop_every_third(data: bytes, arrival_time_ms: int) -> None:
            if next(count) % 3:
                await take(data, arrival_time_ms=arrival_time_ms)

        transport._handle_rtp_data = drop_every_third
        # A report changes the loss, and then the viewer.
        until(lambda: sorted(one._track.viewer._view.halvings for one in peers if one._track.viewer) == [0, 2])


def test_a_viewer_that_vanishes_is_disconnected_soon() -> None:
    with staging(silence_s=2) as stage, watching(stage) as watcher:
        until(lambda: watcher.numbers)
        publisher = Publisher(stage.loop)
        publisher.connection = watcher.connection
        publisher.vanish()
        until(lambda: stage.whep.n_open == 0, seconds=8)


def test_a_viewer_that_leaves_while_it_connects_leaves_no_error() -> None:
    assert asyncio.run(errors_of_an_early_close()) == []


async def errors_of_an_early_close() -> list[dict[str, Any]]:
    """What asyncio reports when a peer is closed between the checks of ICE and the end of the DTLS handshake."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    viewer = RTCPeerConnection()
    viewer.addTransceiver("video", direction="recvonly")
    viewer.createDataChannel("results")
    await viewer.setLocalDescription(await viewer.createOffer())
    peer = ViewerPeer(PeerSettings((), None, 30), lambda: None)
    connected = asyncio.Event()

    def close_early() -> None:
        if peer._connection.iceConnectionState == "completed":
            peer._begin_close()
            connected.set()

    peer._connection.on("iceconnectionstatechange", close_early)
    await peer.accept(viewer.localDescription.sdp)
    await viewer.setRemoteDescription(RTCSessionDescription(peer.answer, "answer"))
    await asyncio.wait_for(connected.wait(), 20)
    await peer.close()
    await viewer.close()
    await asyncio.sleep(0.2)
    gc.collect()  # which is when asyncio reports an error that nobody retrieved
    return reported


def test_the_end_of_the_stream_ends_the_session() -> None:
    with staging() as stage, watching(stage) as watcher:
        until(lambda: watcher.numbers)
        stage.stop_feeding()
        stage.videos.end("door")
        until(lambda: stage.whep.n_open == 0)
        until(lambda: watcher.connection.connectionState == "closed")


def test_a_message_of_a_viewer_is_answered() -> None:
    with staging(answer=lambda stream, text: json.dumps({"stream": stream, "received": text})) as stage:
        with watching(stage) as watcher:
            until(lambda: watcher.records)
            stage.loop.call_soon_threadsafe(watcher.channel.send, "hello")
            stage.loop.call_soon_threadsafe(watcher.channel.send, b"bytes")
            stage.loop.call_soon_threadsafe(watcher.channel.send, "x" * 5000)
            until(lambda: any("received" in one for one in watcher.records))
            time.sleep(0.2)
        assert [one for one in watcher.records if "received" in one] == [{"stream": "door", "received": "hello"}]


# ---- who may come in


def offer_of(stage: Stage) -> str:
    async def made() -> str:
        watcher = Watcher(("VP8", "H264"))
        try:
            return await watcher.offer()
        finally:
            await watcher.connection.close()

    offer: str = stage.do(made())
    return offer


def test_whep_answers_as_its_draft_specifies() -> None:
    with staging() as stage:
        status, _, headers = stage.ask("OPTIONS")
        assert (status, headers["Accept-Post"]) == (204, "application/sdp")
        status, answer, headers = stage.post(offer_of(stage))
        assert (status, headers["Content-Type"].split(";")[0]) == (201, "application/sdp")
        assert "a=sendonly" in answer
        assert "Link" not in headers  # no ICE server by default
        assert stage.ask("PATCH", headers["Location"])[0] == 405
        assert stage.ask("GET", "/whep/door")[0] == 405
        assert stage.ask("DELETE", headers["Location"])[0] == 200
        assert stage.ask("DELETE", headers["Location"])[0] == 404


def test_bad_offers_and_unknown_streams_are_refused_in_one_line() -> None:
    with staging() as stage:
        good = offer_of(stage)
        cases = {
            "": 400,
            "hello": 400,
            b"\xff\xfe": 400,
            good.replace("a=recvonly", "a=sendonly"): 422,
            good.replace("VP8", "VP9").replace("H264", "H265"): 422,
            good.replace("m=video", "m=audio"): 422,
            "".join(line for line in good.splitlines(keepends=True) if not line.startswith("a=fingerprint")): 400,
            "v=0\r\n" * MAX_OFFER_BYTES: 413,
        }
        for offer, expected in cases.items():
            status, text, _ = stage.post(offer)
            assert (status, text.count("\n"), list(json.loads(text))) == (expected, 0, ["error"]), offer[-300:]
        assert stage.ask("POST", content=good, headers={"Content-Type": "text/plain"})[0] == 415
        assert stage.post(good, "/whep/yard")[0] == 404
        assert stage.whep.n_open == 0


def test_token_origin_and_number_are_limited() -> None:
    with staging(token=TOKEN, max_viewers=2, origins=["https://wall.example"]) as stage:
        offer, key = offer_of(stage), {"Authorization": f"Bearer {TOKEN}"}
        assert stage.post(offer)[0] == 401
        assert stage.post(offer, Authorization="Bearer wrong")[0] == 401
        assert stage.post(offer, f"/whep/door?token={TOKEN}")[0] == 201
        assert stage.post(offer, **key, Origin="https://evil.example")[0] == 403
        assert stage.post(offer, **key, Origin="https://wall.example")[0] == 201
        status, text, _ = stage.post(offer, **key)
        assert (status, json.loads(text)) == (503, {"error": "2 are watching, which is the limit; try again later"})
