from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from saccade.engine import Engine
from saccade.engine.tasks import Detect
from saccade.pipeline.analytics.saccades.planner import Reason
from saccade.pipeline.api.http_server import HttpServer, serve
from saccade.pipeline.config import parse_place
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.streams import Streams
from saccade.sources import open_source
from saccade.sources.replay import ReplaySource
from saccade.web.server import MAX_CONNECTIONS
from tests.support import REPO
from tests.support.control import attach, controller_of
from tests.support.http_routes import AnyoneRoute, answering, failing, hanging

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
LONG_S = 60  # far beyond what any of these needs; only so that a hang fails
NOWHERE = "rtsp://me:secret@127.0.0.1:1/door"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def controller(streams: Streams) -> Controller:
    return controller_of(streams)


@pytest.fixture
def server(controller: Controller) -> Iterator[HttpServer]:
    one = serve(controller, port=0)
    yield one
    one.close()


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def ask(server: HttpServer, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=LONG_S)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None and not isinstance(body, bytes):
        body, given = json.dumps(body).encode(), {**JSON, **given}
    try:
        connection.request(method, path, body, given)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def error_of(answer: Answer) -> str:
    assert list(answer.json) == ["error"]
    line: str = answer.json["error"]
    assert "\n" not in line
    assert "secret" not in line
    return line


def test_a_stream_is_added_changed_and_ended_over_http(server: HttpServer, streams: Streams) -> None:
    begun = ask(server, "POST", "/streams", {"source": str(CLIP), "name": "door", "detect": "people", "queue": "wait"})
    assert (begun.status, begun.headers["Location"]) == (201, "/streams/door")
    assert (begun.json["name"], begun.json["detect"], begun.json["live"]) == ("door", ["person"], False)
    wait_for(lambda: ask(server, "GET", "/streams/door").json["frames_out"] >= 2)
    changed = ask(server, "PATCH", "/streams/door", {"point": ["chair"], "conf": 0.25})
    assert changed.status == 200
    assert streams.get("door").tasks[0] == Detect("person", 50, 0.25)
    assert (changed.json["detect"], changed.json["point"], changed.json["conf"]) == (["person"], ["chair"], 0.25)
    (listed,) = ask(server, "GET", "/streams").json["streams"]
    assert (listed["state"], listed["latency_ms"]["p50"] > 0, listed["fps"] > 0) == ("running", True, True)
    assert ask(server, "DELETE", "/streams/door").status == 204
    assert ask(server, "GET", "/streams").json == {"streams": []}
    assert ask(server, "DELETE", "/streams/door").status == 404


def test_health_is_that_of_every_stream(server: HttpServer, streams: Streams) -> None:
    assert (ask(server, "GET", "/healthz").status, ask(server, "GET", "/healthz").json["ok"]) == (200, True)
    streams.add("clip", open_source(CLIP), [Detect("person")])
    assert ask(server, "GET", "/healthz").status == 200
    assert ask(server, "POST", "/streams", {"source": NOWHERE, "name": "door", "detect": "person"}).status == 201
    wait_for(lambda: ask(server, "GET", "/healthz").status == 503)
    assert ask(server, "GET", "/healthz").json == {
        "ok": False,
        "streams": 2,
        "unhealthy": {"door": "connecting: connection failed"},
    }
    assert "secret" not in ask(server, "GET", "/streams").text
    streams.remove("door")
    assert ask(server, "GET", "/healthz").status == 200


def test_prometheus_reads_what_happened(server: HttpServer, streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Engine, "counters", lambda self: {"busy_seconds_total": 1.0, "steps_total": 7, "pages free": 9.5}, raising=False
    )
    run = streams.add("clip", ReplaySource(open_source(CLIP)), [Detect("person")])
    wait_for(lambda: run.report().frames >= 3)
    answer = ask(server, "GET", "/metrics")
    assert (answer.status, answer.headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}

    def value(name: str, sample: str = "", **labels: str) -> float:
        return next(s.value for s in families[name].samples if s.name == (sample or name) and s.labels == labels)

    report = run.report()
    assert 3 <= value("saccade_frames_out", "saccade_frames_out_total", stream="clip") <= report.frames
    assert 3 <= value("saccade_frames_in", "saccade_frames_in_total", stream="clip") <= report.read
    assert value("saccade_stream_up", stream="clip") == 1
    objects = [s for s in families["saccade_objects"].samples if s.labels == {"stream": "clip", "class": "person"}]
    assert [s.value <= report.objects for s in objects] == [True]
    assert all(len(family.documentation) > 25 for name, family in families.items() if name.startswith("saccade_"))
    assert value("saccade_stream_state", stream="clip", state="running") == 1
    assert value("saccade_queue_length", stream="clip", queue="engine") >= 0
    assert value("saccade_result_age_seconds", stream="clip") > 0
    assert value("saccade_engine_steps", "saccade_engine_steps_total") == 7
    assert value("saccade_engine_pages_free") == 9.5
    assert value("process_resident_memory_bytes") > 1e7
    stages = {s.labels["stage"] for s in families["saccade_latency_seconds"].samples}
    assert stages == {"decode", "queue", "prefill", "decode_tokens", "track", "total"}
    buckets = [
        s.value
        for s in families["saccade_latency_seconds"].samples
        if s.name.endswith("_bucket") and s.labels["stage"] == "total"
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value(
        "saccade_latency_seconds", "saccade_latency_seconds_count", stream="clip", stage="total"
    )


def test_drops_have_their_cause_in_the_metrics(server: HttpServer, streams: Streams) -> None:
    body = {"source": str(CLIP), "name": "clip", "detect": "person", "queue": "newest", "tiles": 2}
    assert ask(server, "POST", "/streams", body).status == 201
    wait_for(lambda: 'saccade_frames_dropped_total{cause="full",stream="clip"}' in ask(server, "GET", "/metrics").text)


def test_windows_are_counted_by_reason_in_the_metrics(server: HttpServer, streams: Streams) -> None:
    body = {"source": str(CLIP), "name": "clip", "detect": "person", "queue": "wait", "saccades": "1"}
    assert ask(server, "POST", "/streams", body).status == 201
    wait_for(lambda: "saccade_looks_total{" in ask(server, "GET", "/metrics").text)
    families = {one.name: one for one in text_string_to_metric_families(ask(server, "GET", "/metrics").text)}
    reasons = {one.labels["reason"] for one in families["saccade_looks"].samples}
    assert reasons <= set(get_args(Reason))
    assert ask(server, "PATCH", "/streams/clip", {"saccades": "auto"}).json["saccades"] == "auto"


GOOD = {"source": str(CLIP), "name": "other", "detect": "person"}

BAD = {
    "not JSON": ("POST", "/streams", b"{", JSON, 400, "not JSON"),
    "deeply nested": ("POST", "/streams", b"[" * 60_000, JSON, 400, "not JSON"),
    "not an object": ("POST", "/streams", [1], {}, 422, "should be"),
    "another type": ("POST", "/streams", b"source=a", {"Content-Type": "text/plain"}, 415, "application/json"),
    "not encoded as declared": (
        "POST",
        "/streams",
        b"{}",
        {**JSON, "Content-Encoding": "gzip"},
        400,
        "does not match its Content-Encoding header",
    ),
    "half a path": ("POST", "/streams", {**GOOD, "source": "a\0b"}, {}, 422, "NUL"),
    "not UTF-8": ("POST", "/streams", b"\xff\xfe", JSON, 400, "UTF-8"),
    "unknown key": ("POST", "/streams", {**GOOD, "detct": "a"}, {}, 422, "did you mean 'detect'?"),
    "no source": ("POST", "/streams", {"detect": "person"}, {}, 422, "source is missing"),
    "nothing to look for": ("POST", "/streams", {"source": "a.mp4"}, {}, 422, "no prompts"),
    "no such file": ("POST", "/streams", {**GOOD, "source": "none.mp4"}, {}, 422, "no such file"),
    "no such class": ("POST", "/streams", {**GOOD, "detect": "unicorn"}, {}, 422, "unicorn"),
    "no such skill": ("POST", "/streams", {**GOOD, "query": "why?"}, {}, 422, "does not support query"),
    "no such scheme": ("POST", "/streams", {**GOOD, "source": "gopher://me:secret@x/"}, {}, 422, "not supported"),
    "wrong name": ("POST", "/streams", {**GOOD, "name": "../../etc"}, {}, 422, "invalid stream name"),
    "name taken": ("POST", "/streams", {**GOOD, "name": "clip"}, {}, 409, "already"),
    "sinks are not for clients": ("POST", "/streams", {**GOOD, "sinks": ["/etc/x"]}, {}, 422, "unknown key 'sinks'"),
    "wrong conf": ("PATCH", "/streams/clip", {"conf": 2}, {}, 422, "less than or equal to 1"),
    "unknown prompt": ("PATCH", "/streams/clip", {"detect": ["unicorn"]}, {}, 422, "unicorn"),
    "no prompt left": ("PATCH", "/streams/clip", {"detect": []}, {}, 422, "no prompts"),
    "too many prompts": ("PATCH", "/streams/clip", {"detect": ["cat"] * 65}, {}, 422, "at most 64"),
    "not a prompt": ("PATCH", "/streams/clip", {"source": "a"}, {}, 422, "unknown key 'source'"),
    "no such stream": ("PATCH", "/streams/none", {"detect": ["cat"]}, {}, 404, "stream 'none' does not exist"),
    "no such stream to end": ("DELETE", "/streams/none", None, {}, 404, "does not exist"),
    "no such page": ("GET", "/nothing", None, {}, 404, "Not Found"),
    "no such method": ("PUT", "/streams", {}, {}, 405, "Method Not Allowed"),
    "too long": ("POST", "/streams", b" " * 70_000, JSON, 413, "at most 65536 bytes"),
    "a page of another origin": ("POST", "/streams", GOOD, {"Origin": "https://evil.example"}, 403, "origin"),
    "a foreign host name": (
        "GET",
        "/streams",
        None,
        {"Host": "evil.example:8080"},
        403,
        "use an IP address or localhost",
    ),
}


def test_a_bad_request_gets_one_line_and_changes_nothing(
    server: HttpServer, controller: Controller, streams: Streams
) -> None:
    run = attach(controller, "clip", open_source(CLIP))
    for case, (method, path, body, headers, status, message) in BAD.items():
        answer = ask(server, method, path, body, **headers)
        assert answer.status == status, f"{case}: {answer.status} {answer.text}"
        assert message in error_of(answer), case
    assert streams.names == ["clip"]
    assert run.tasks == (Detect("person"),)
    assert run.error is None


def test_a_client_that_goes_amid_its_body_is_no_error(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=LONG_S) as connection:
        head = "POST /streams HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\nExpect: 100-continue\r\n\r\n".encode())
        assert b" 100 " in connection.recv(64)  # it is being waited for
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(64) == b""
    assert ask(server, "GET", "/livez").status == 200  # by then the first request is over
    assert not caplog.records


def test_surplus_connections_are_closed(server: HttpServer) -> None:
    place = urlsplit(server.url)
    with ExitStack() as stack:

        def connect() -> socket.socket:
            address = (place.hostname or "", place.port or 0)
            return stack.enter_context(socket.create_connection(address, timeout=LONG_S))

        first, *_ = [connect() for _ in range(MAX_CONNECTIONS)]
        first.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in first.recv(64)  # and all the others have been seen by now
        for _ in range(20):
            with suppress(ConnectionResetError):
                assert connect().recv(1) == b""
    wait_for(lambda: not _refused(server))


def test_an_unreadable_request_leaves_no_token_in_the_log(streams: Streams, caplog: pytest.LogCaptureFixture) -> None:
    routes = [failing("/broken", RuntimeError("secret"))]
    server = serve(controller_of(streams), port=0, token="sesame", routes=routes)
    try:
        place = urlsplit(server.url)
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=LONG_S) as connection:
            connection.sendall(b"GET /streams?token=sesame\xff HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 400 " in connection.recv(64)
        answer = ask(server, "GET", "/broken?token=sesame")
        assert (answer.status, error_of(answer)) == (500, "internal error: RuntimeError")
    finally:
        server.close()
    assert "GET /broken failed" in caplog.text
    assert "sesame" not in caplog.text


def _refused(server: HttpServer) -> bool:
    try:
        return ask(server, "GET", "/healthz").status != 200
    except OSError:
        return True


def test_a_token_is_required_for_everything_but_public_paths(streams: Streams) -> None:
    routes = [answering("/outside", b"hello", AnyoneRoute), answering("/inside", b"hello")]
    server = serve(controller_of(streams), port=0, token="sesame", origins=["https://mine.example"], routes=routes)
    try:
        for path in ("/streams", "/healthz", "/metrics", "/inside", "/nothing"):
            refused = ask(server, "GET", path)
            assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert ask(server, "GET", f"{path}?token=wrong").status == 401
        assert ask(server, "GET", "/outside").text == "hello"
        assert ask(server, "GET", "/inside", Authorization="Bearer sesame", Host="cam.example").text == "hello"
        mine = ask(server, "GET", "/streams?token=sesame", Origin="https://mine.example")
        assert (mine.status, mine.headers["Access-Control-Allow-Origin"]) == (200, "https://mine.example")
        assert ask(server, "GET", "/streams?token=sesame", Origin="https://other.example").status == 403
        may = ask(server, "OPTIONS", "/streams/door", Origin="https://mine.example")
        assert (may.status, "PATCH" in may.headers["Access-Control-Allow-Methods"]) == (204, True)
    finally:
        server.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_on_the_network_needs_a_token(streams: Streams, host: str) -> None:
    with pytest.raises(ConfigError, match="requires a token"):
        serve(controller_of(streams), host, 0)


def test_a_taken_port_is_one_line(server: HttpServer, streams: Streams) -> None:
    port = urlsplit(server.url).port or 0
    before = threading.active_count()
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: address already in use$"):
        serve(controller_of(streams), port=port)
    assert threading.active_count() == before


def test_routes_of_others_run_on_its_loop_until_it_is_closed() -> None:
    seen: list[str] = []
    waiting = threading.Event()

    async def hook(word: str) -> None:
        seen.append(word)

    server = HttpServer([hanging("/slow", waiting)], {}, port=0, on_cleanup=[lambda: hook("down")])
    assert ask(server, "GET", "/streams").status == 404
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=LONG_S) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert waiting.wait(LONG_S)
        begun = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - begun < 8  # a second for those who are being served
        assert connection.recv(64) == b""
    assert seen == ["down"]
    assert not [thread for thread in threading.enumerate() if thread.name == "saccade-http"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9000", ("127.0.0.1", 9000)),
        (":9000", ("127.0.0.1", 9000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("localhost", ("localhost", 8080)),
        ("[::1]:81", ("::1", 81)),
    ],
)
def test_places_are_read(text: str, place: tuple[str, int]) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["a:b", "a:99999", "http://a:1/x", "a/b", "me:secret@a:1", "a:1?token=secret", "[::1"])
def test_other_places_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_place(text)
