"""Which clients a feed admits, and what they subscribe to: the addresses and messages themselves, without a socket."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from saccade.sinks import SinkError
from saccade.sinks.websocket.access import FeedTarget, RefusedError
from saccade.sinks.websocket.subscription import Subscription


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ws://", ("127.0.0.1", 8765, "/", None, 32)),
        ("ws://127.0.0.1:0/feed", ("127.0.0.1", 0, "/feed", None, 32)),
        ("ws://[::1]:9000?max_clients=2", ("::1", 9000, "/", None, 2)),
        ("ws://localhost", ("localhost", 8765, "/", None, 32)),
        ("ws://0.0.0.0:8765/?token=sesame", ("0.0.0.0", 8765, "/", "sesame", 32)),
        ("WS://127.0.0.2?token=a%2Bb", ("127.0.0.2", 8765, "/", "a+b", 32)),
    ],
)
def test_every_part_of_a_target_may_be_left_out(text: str, expected: tuple[object, ...]) -> None:
    target = FeedTarget.parse(text)
    assert (target.host, target.port, target.path, target.token, target.max_clients) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ws://0.0.0.0", "is reachable from the network: add a token with the option token"),
        ("ws://camera.example:8765?token=", "is reachable from the network"),
        ("ws://127.0.0.1:port", "is not an address to listen on"),
        ("ws://127.0.0.1:70000", "is not an address to listen on"),
        ("ws://sesame@127.0.0.1", "write the token as ?token="),
        ("ws://127.0.0.1?tokn=sesame", "did you mean 'token'?"),
        ("ws://127.0.0.1?token=a+b", "write + as %2B"),
        ("ws://127.0.0.1?max_clients=0", "max_clients should be a whole number"),
        ("ws://127.0.0.1?cert=a.pem", "unknown option 'cert'"),
        ("wss://127.0.0.1", "needs a certificate"),
        ("wss://127.0.0.1?cert=/nowhere.pem", "cannot read the certificate /nowhere.pem: No such file"),
    ],
)
def test_an_invalid_target_is_one_line_without_its_token(text: str, reason: str) -> None:
    with pytest.raises(SinkError) as caught:
        FeedTarget.parse(text)
    assert reason in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_repr_of_a_target_hides_its_token() -> None:
    assert "sesame" not in repr(FeedTarget.parse("ws://0.0.0.0?token=sesame"))


OPEN = FeedTarget.parse("ws://127.0.0.1/feed?origin=https://board.example&origin=null")
LOCKED = FeedTarget.parse("ws://0.0.0.0?token=s%C3%A9same&origin=*")


@pytest.mark.parametrize(
    ("target", "request_line", "origin", "authorization", "status"),
    [
        (OPEN, "/feed", None, None, None),
        (OPEN, "/feed?stream=door&mode=newest", None, None, None),
        (OPEN, "/", None, None, HTTPStatus.NOT_FOUND),
        (OPEN, "//[", None, None, HTTPStatus.NOT_FOUND),
        (OPEN, "/feed?mode=oldest", None, None, HTTPStatus.BAD_REQUEST),
        (OPEN, "/feed?streams=door", None, None, HTTPStatus.BAD_REQUEST),
        (OPEN, "/feed", "https://board.example", None, None),
        (OPEN, "/feed", "null", None, None),
        (OPEN, "/feed", "http://localhost:8080", None, None),
        (OPEN, "/feed", "http://127.0.0.1:8080", None, None),
        (OPEN, "/feed", "http://[::1]", None, None),
        (OPEN, "/feed", "https://board.example.evil.example", None, HTTPStatus.FORBIDDEN),
        (OPEN, "/feed", "http://127.0.0.1.evil.example", None, HTTPStatus.FORBIDDEN),
        (OPEN, "/feed", "http://localhost@evil.example", None, HTTPStatus.FORBIDDEN),
        (OPEN, "/feed", "chrome-extension://127.0.0.1", None, HTTPStatus.FORBIDDEN),
        (OPEN, "/feed", "http://[", None, HTTPStatus.FORBIDDEN),
        (LOCKED, "/", "https://any.example", "Bearer sésame", None),
        (LOCKED, "/", None, "bearer  sésame ", None),
        (LOCKED, "/?token=s%C3%A9same", None, None, None),
        (LOCKED, "/?token=sesam&token=s%C3%A9same", None, None, None),
        (LOCKED, "/", None, None, HTTPStatus.UNAUTHORIZED),
        (LOCKED, "/?token=", None, "Bearer ", HTTPStatus.UNAUTHORIZED),
        (LOCKED, "/?token=sesame", None, "Bearer sesame\udcff", HTTPStatus.UNAUTHORIZED),
        (LOCKED, "/", None, "Basic sésame", HTTPStatus.UNAUTHORIZED),
    ],
)
def test_a_client_is_admitted_or_refused(
    target: FeedTarget, request_line: str, origin: str | None, authorization: str | None, status: HTTPStatus | None
) -> None:
    origins = [origin] if origin is not None else []
    authorizations = [authorization] if authorization is not None else []
    if status is None:
        target.admit(request_line, origins, authorizations)
        return
    with pytest.raises(RefusedError) as caught:
        target.admit(request_line, origins, authorizations)
    assert caught.value.status is status


def test_one_forbidden_origin_among_several_is_refused() -> None:
    with pytest.raises(RefusedError):
        OPEN.admit("/feed", ["http://localhost", "https://evil.example"], [])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", Subscription()),
        ("stream=door&stream=back%20yard", Subscription(frozenset({"door", "back yard"}))),
        ("mode=newest&token=x", Subscription(mode="newest")),
    ],
)
def test_a_query_makes_a_subscription(query: str, expected: Subscription) -> None:
    assert Subscription.from_query(query) == expected


DOOR = Subscription(frozenset({"door"}), "newest")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"subscribe": "all"}', Subscription(None, "newest")),
        ('{"subscribe": []}', Subscription(frozenset(), "newest")),
        ('{"subscribe": ["yard", "yard"]}', Subscription(frozenset({"yard"}), "newest")),
        ('{"mode": "all"}', Subscription(frozenset({"door"}), "all")),
        ('{"subscribe": null, "mode": "all"}', Subscription(frozenset({"door"}), "all")),
        ('{"subscribe": null}', DOOR),
        (b'{"subscribe": "all", "mode": "all"}', Subscription()),
    ],
)
def test_a_message_changes_only_what_it_names(text: str | bytes, expected: Subscription) -> None:
    assert DOOR.updated_by(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "door",
            "[" * 4000,
            "NaN",
            "1" * 4095,
            "null",
            "[]",
            "{}",
            '"all"',
            '{"subscribe": "door"}',
            '{"mode": []}',
        ),
        *(
            '{"subscribe": [1]}',
            '{"subscribe": {}}',
            '{"mode": "fastest"}',
            '{"unsubscribe": []}',
        ),
        *(b"\xff\xfe\x00", '{"mode": "' + "x" * 4000 + '"}', '{"subscribe": "all", "mode": 1}'),
    ],
)
def test_an_invalid_message_is_answered_in_one_short_line(text: str | bytes) -> None:
    with pytest.raises(ValueError) as caught:
        DOOR.updated_by(text)
    assert 0 < len(str(caught.value)) < 200
