"""Targets of sinks: paths, addresses and options, and how they are shown without secrets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from saccade.sinks import SinkError, open_sink
from saccade.sinks.urls import Address, Options, redact_target, split_path
from tests.support import REPO

PORTS = {"mqtt": 1883, "https": 443}


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("out.mp4", "out.mp4"),
        ("mqtt://me:secret@host:1883/x", "mqtt://host:1883"),
        ("mqtt://me:sec/ret@host", "mqtt://host"),
        ("mqtt://me:sec#ret?@host/x", "mqtt://host"),
        ("mqtt://me:sec@ret@host/x", "mqtt://host"),
        ("http://me:secret", "http://***"),
        ("https://hooks.example/services/secret?mail=a@b.example", "https://hooks.example"),
        ("http://[::1]:80/secret", "http://[::1]:80"),
        ("ws://:8080?token=secret", "ws://:8080"),
        ("http://me:secret secret", "http://***"),
        ("mqtt://me:1?2@host/x", "mqtt://***"),
        ("ws://localhost:80?token=a@b", "ws://localhost:80"),
        ("mqtt:me:secret@host/x", "mqtt:***@host/x"),
        ("me:secret@host:1883/x", "***@host:1883/x"),
        ("yard/a@b.mp4", "yard/a@b.mp4"),
    ],
)
def test_a_redacted_target_shows_only_the_host(target: str, shown: str) -> None:
    assert redact_target(target) == shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mqtt://host", ("mqtt", "host", 1883, None, None, "")),
        ("MQTT://Host:1/a/b/?x=1", ("mqtt", "host", 1, None, None, "a/b")),
        ("mqtt://me@host", ("mqtt", "host", 1883, "me", None, "")),
        ("mqtt://m%40e:p%2Fw%3A@host", ("mqtt", "host", 1883, "m@e", "p/w:", "")),
        ("https://[::1]:8443/x", ("https", "::1", 8443, None, None, "x")),
    ],
)
def test_an_address_is_parsed(text: str, expected: tuple[object, ...]) -> None:
    address = Address.parse(text, PORTS, "mqtt://host")
    found = (address.scheme, address.host, address.port, address.user, address.password, address.path)
    assert found == expected
    assert repr(address) == f"Address('{redact_target(text)}')"


@pytest.mark.parametrize(
    "text",
    ["mqtt://", "mqtt://h:x", "mqtt://h:0", "mqtt://h:70000", "ftp://h", "mqtt://[::1", "mqtt://a..b", "mqtt://a b/x"],
)
def test_an_invalid_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SinkError, match=r"is not a valid address: use mqtt://host"):
        Address.parse(text, PORTS, "mqtt://host")


@pytest.mark.parametrize(
    ("text", "path", "options"),
    [
        ("a.mp4", "a.mp4", False),
        ("a.mp4?segment=1", "a.mp4", True),
        ("a.mp4?", "a.mp4", False),
        ("what?.mp4", "what?.mp4", False),
        ("what?.MP4?segment=1", "what?.MP4", True),
        ("a.txt?x=1", "a.txt?x=1", False),
    ],
)
def test_a_question_mark_in_a_file_name_is_kept(text: str, path: str, options: bool) -> None:
    found, given = split_path(text, (".mp4",))
    assert (found, bool(given)) == (path, options)


ASKED: dict[str, tuple[Callable[[Options], object], object]] = {
    "x=1": (lambda o: o.flag("x"), True),
    "x=off": (lambda o: o.flag("x"), False),
    "": (lambda o: o.flag("x"), False),
    "x=b": (lambda o: o.choice("x", ("a", "b")), "b"),
    "x=7": (lambda o: o.count("x", 5), 7),
    "x=0.5": (lambda o: o.number("x"), 0.5),
    "y=1": (lambda o: o.number("x"), None),
    "x=90": (lambda o: o.seconds("x", 1), 90),
    "x=1.5m": (lambda o: o.seconds("x", 1), 90),
    "x=2h": (lambda o: o.seconds("x", 1), 7200),
    "x=7d": (lambda o: o.count_or_age("x", 5), (None, 7 * 86400)),
    "x=5": (lambda o: o.count_or_age("x", 5), (5, None)),
    "w=5": (lambda o: o.count_or_age("x", 5), (None, None)),
    "x=a&x=b": (lambda o: o.texts("x"), ["a", "b"]),
    "x=": (lambda o: o.text("x", "d"), ""),
}


@pytest.mark.parametrize("text", ASKED)
def test_options_are_read(text: str) -> None:
    ask, expected = ASKED[text]
    assert ask(Options(text, "out")) == expected


COUNT_OR_AGE = "a whole number from 1 to 5, or a time such as 12h or 7d"
REFUSED: dict[str, tuple[Callable[[Options], object], str]] = {
    "x=maybe": (lambda o: o.flag("x"), "out: x should be 0 or 1, not 'maybe'"),
    "x=c": (lambda o: o.choice("x", ("a", "b")), "out: x should be a or b, not 'c'"),
    "x=0": (lambda o: o.count("x", 5, 9), "out: x should be a whole number from 1 to 9, not '0'"),
    "x=-1": (lambda o: o.number("x"), "out: x should be a number above 0, not '-1'"),
    "x=nan": (lambda o: o.number("x"), "out: x should be a number above 0, not 'nan'"),
    "x=inf": (lambda o: o.number("x"), "out: x should be a number above 0, not 'inf'"),
    "x=": (lambda o: o.number("x"), "out: x should be a number above 0, not ''"),
    "x=1w": (lambda o: o.seconds("x", 1), "out: x should be a time such as 90, 10m, 1h or 7d, not '1w'"),
    "x=7": (
        lambda o: o.count_or_age("x", 5),
        f"out: x should be {COUNT_OR_AGE}, not '7'",
    ),
    "kep=1": (lambda o: (o.count("keep", 5), o.reject_unknown()), "out: unknown option 'kep'; did you mean 'keep'?"),
    "z=1": (lambda o: (o.flag("records"), o.reject_unknown()), "out: unknown option 'z'; known: records"),
    "q=1": (lambda o: o.reject_unknown(), "out: unknown option 'q'; known: none"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_option_is_refused_in_one_line(text: str) -> None:
    ask, expected = REFUSED[text]
    with pytest.raises(SinkError) as caught:
        ask(Options(text, "out"))
    assert str(caught.value) == expected


@pytest.mark.parametrize("target", ["whep:8080", "whep://127.0.0.1:8080?token=secret", "WHEP:1"])
def test_whep_is_refused_with_the_right_command(target: str) -> None:
    with pytest.raises(SinkError, match="saccade run --sink whep:PORT") as caught:
        open_sink(target)
    assert "secret" not in str(caught.value)


def test_a_sink_loads_its_library_only_when_opened() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import saccade.sinks\n"
        "print([name for name in ('torch', 'aiomqtt', 'paho', 'httpx', 'websockets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(REPO)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
