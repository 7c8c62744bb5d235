"""The WebSocket feed, over real sockets: who gets what, who is refused, and how it ends."""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidMessage, InvalidStatus
from websockets.sync.client import connect

from saccade.sinks import SinkError, open_sink
from saccade.sinks.websocket import server as websocket_module
from saccade.sinks.websocket.server import WebSocketSink
from tests.support.sinks.feed import UNREAD, ask, feed, hear, make_certificate, port_of, until, write
from tests.support.sinks.results import FRAME, LATENCY, RECORD, RESULT
from tests.support.sinks.rule_events import BEGIN, RULES

SCHEMA = {"schema": "saccade/2"}

# ---- who gets what


def test_a_client_gets_a_greeting_and_the_exact_record() -> None:
    with feed() as sink, connect(sink.url) as client:
        assert hear(client) == {**SCHEMA, "streams": [], "subscribe": "all", "mode": "all"}
        sink.write(FRAME, RESULT, LATENCY)
        assert hear(client) == RECORD
        with connect(sink.url) as late:
            assert hear(late)["streams"] == ["door"]
            sink.end("door")
            assert hear(client) == hear(late) == {**SCHEMA, "stream": "door", "ended": True}
        with connect(sink.url) as later:
            assert hear(later)["streams"] == []
        assert (sink.sent, sink.dropped) == (1, 0)


def test_events_are_notices_of_their_stream() -> None:
    with feed() as sink, connect(sink.url) as every, connect(f"{sink.url}?stream=yard") as other:
        hear(every), hear(other)
        write(sink, "door")
        assert hear(every)["frame"] == 0
        for event in (RULES, BEGIN):
            sink.write_event(event)
        assert hear(every) == {**SCHEMA, "stream": "door", "event": BEGIN}
        assert ask(every, subscribe="all")["streams"] == ["door"]
        write(sink, "yard")
        assert hear(other)["stream"] == "yard"


def test_each_client_gets_the_streams_it_subscribed_to() -> None:
    with feed() as sink, connect(sink.url) as every, connect(f"{sink.url}?stream=door&stream=gate") as some:
        assert hear(every)["subscribe"] == "all"
        assert hear(some)["subscribe"] == ["door", "gate"]
        for stream in ("yard", "door", "gate"):
            write(sink, stream)
        assert [hear(every)["stream"] for _ in range(3)] == ["yard", "door", "gate"]
        assert [hear(some)["stream"] for _ in range(2)] == ["door", "gate"]

        answer = ask(some, subscribe=["yard"], mode="newest")
        assert answer == {**SCHEMA, "streams": ["yard", "door", "gate"], "subscribe": ["yard"], "mode": "newest"}
        for stream in ("door", "yard"):
            write(sink, stream)
        assert hear(some)["stream"] == "yard"
        sink.end("door")
        assert ask(some, subscribe="all")["subscribe"] == "all"
        write(sink, "door")
        assert hear(some)["stream"] == "door"


def test_streams_written_at_the_same_time_keep_their_order() -> None:
    names, count = ("a", "b", "c"), 60
    with feed() as sink, connect(sink.url) as client:
        hear(client)

        def run(name: str) -> None:
            for index in range(count):
                write(sink, name, index)
                time.sleep(0.002)

        threads = [threading.Thread(target=run, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        heard = [hear(client) for _ in range(count * len(names))]
        for thread in threads:
            thread.join()
    for name in names:
        assert [record["frame"] for record in heard if record["stream"] == name] == list(range(count))


def test_newest_mode_keeps_a_slow_client_up_to_date() -> None:
    slow_s, records, written = 0.05, 20, 0
    done = threading.Event()
    with feed() as sink, connect(f"{sink.url}?mode=newest", **UNREAD) as client:
        hear(client)

        def run() -> None:
            nonlocal written
            while not done.is_set():
                written += 1
                write(sink, index=written)
                time.sleep(0.004)

        thread = threading.Thread(target=run)
        thread.start()
        ages, lost, indexes = [], 0, [0]
        while len(indexes) <= records:
            heard = hear(client)
            if "dropped" in heard:
                lost += heard["dropped"]
                continue
            indexes.append(heard["frame"])
            ages.append(written - heard["frame"])
            assert heard["frame"] == len(indexes) - 1 + lost  # every record was sent, or reported as lost
            time.sleep(slow_s)
        done.set()
        thread.join()
    # Without waiting for the client, all would lie in the buffers of TCP and the last be as old as most of the run.
    assert max(ages) < written / 2


# ---- who is refused, and what a client may say


@pytest.mark.parametrize(
    ("options", "path", "headers", "status"),
    [
        ("?token=sesame", "", {}, 401),
        ("?token=sesame", "?token=sesam", {}, 401),
        ("?token=sesame", "", {"Authorization": "Bearer sesame"}, None),
        ("?token=sesame", "?token=sesame&stream=door", {}, None),
        ("", "", {"Origin": "https://evil.example"}, 403),
        ("", "", {"Origin": "http://localhost:8080"}, None),
        ("?origin=https://a.example&origin=https://b.example/", "", {"Origin": "https://b.example"}, None),
        ("/feed", "", {}, None),
        ("/feed", "/more", {}, 404),
        ("", "?mode=slow", {}, 400),
    ],
)
def test_a_connection_is_accepted_or_refused(
    options: str, path: str, headers: dict[str, str], status: int | None
) -> None:
    with feed(options) as sink:
        if status is None:
            with connect(sink.url + path, additional_headers=headers) as client:
                assert "streams" in hear(client)
        else:
            with pytest.raises(InvalidStatus) as caught:
                connect(sink.url + path, additional_headers=headers)
            assert caught.value.response.status_code == status
            assert caught.value.response.body  # says why
        assert "sesame" not in sink.url


def test_no_token_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("websockets").setLevel(logging.CRITICAL)  # that is this client's
    with feed("?token=sesame") as sink:
        with connect(f"{sink.url}?token=sesame") as client:
            hear(client)
        with pytest.raises(InvalidStatus):
            connect(f"{sink.url}?token=open-sesame")
    assert "the WebSocket server listens on" in caplog.text
    assert "sesame" not in caplog.text


def test_one_client_too_many_is_refused_until_one_leaves() -> None:
    with feed("?max_clients=2") as sink, connect(sink.url) as first:
        with connect(sink.url):
            until(lambda: sink.clients == 2)
            with pytest.raises(InvalidStatus) as caught:
                connect(sink.url)
            assert caught.value.response.status_code == 503
        until(lambda: sink.clients == 1)
        with connect(sink.url) as third:
            hear(third)
        hear(first)


def test_an_invalid_message_gets_an_error_a_large_one_closes() -> None:
    with feed() as sink, connect(sink.url) as client, connect(sink.url) as other:
        assert "subscribe" in hear(client)
        for bad in ("{", b"\xff", '{"mode": "slow"}', "[" * 4000):
            client.send(bad)
            assert set(hear(client)) == {"schema", "error"}
        client.send(json.dumps({"subscribe": ["x" * 5000]}))
        with pytest.raises(ConnectionClosedError) as caught:
            hear(client)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009
        hear(other)
        write(sink)
        assert hear(other)["frame"] == 0


def test_a_feed_over_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    sink = open_sink(f"wss://127.0.0.1:0?cert={certificate}&key={key}&token=sesame")
    assert isinstance(sink, WebSocketSink)
    try:
        assert sink.url.startswith("wss://")
        trust = ssl.create_default_context(cafile=certificate)
        with connect(sink.url, ssl=trust, additional_headers={"Authorization": "Bearer sesame"}) as client:
            hear(client)
            write(sink, size=20_000)
            assert len(hear(client)["answers"][0]["text"]) == 20_000
        with pytest.raises(InvalidMessage):
            connect(sink.url.replace("wss", "ws"), open_timeout=2)
    finally:
        sink.close()
    with pytest.raises(SinkError, match="does not match its key"):
        WebSocketSink(f"wss://127.0.0.1:0?cert={key}&key={key}")


# ---- the end


def test_close_sends_what_waits_and_ends_its_thread() -> None:
    before = set(threading.enumerate())
    sink = WebSocketSink("ws://127.0.0.1:0")
    with connect(sink.url) as client, socket.create_connection(("127.0.0.1", port_of(sink))):  # who never asks
        hear(client)
        for index in range(50):
            write(sink, index=index)
        closing = threading.Thread(target=sink.close)
        closing.start()
        assert [hear(client)["frame"] for _ in range(50)] == list(range(50))
        with pytest.raises(ConnectionClosed) as caught:
            hear(client)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001
        closing.join(10)
        assert not closing.is_alive()
    sink.close()
    write(sink)
    sink.end("door")
    assert not [thread for thread in set(threading.enumerate()) - before if "feed" in thread.name]
    with pytest.raises(OSError):
        connect(sink.url)


def test_a_port_in_use_is_one_line() -> None:
    with feed() as sink, pytest.raises(SinkError, match=r"^WebSocket server.* 127.0.0.1:\d+: address already in use$"):
        WebSocketSink(f"ws://127.0.0.1:{port_of(sink)}")


def test_an_invalid_host_is_one_line() -> None:
    with pytest.raises(SinkError, match=r"^WebSocket server: cannot listen on a\.\.b:0: invalid host name$"):
        WebSocketSink("ws://a..b:0?token=sesame")


def test_the_client_in_the_manual_runs() -> None:
    manual = websocket_module.__doc__ or ""
    code = re.search(r"\n    import json\n(?:.*\n)+?(?=\S)", manual)
    assert code
    lines = "\n".join(line[4:] for line in code[0].splitlines())
    with feed("?token=sesame") as sink:
        program = [sys.executable, "-u", "-c", lines.replace("ws://127.0.0.1:8765", sink.url)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            until(lambda: sink.clients == 1, 30)
            sink.write(FRAME, RESULT, LATENCY)
            assert client.stdout is not None
            assert client.stdout.readline() == "door ['person']\n"
            sink.close()  # a client ends quietly with the feed
            assert client.wait(10) == 0
