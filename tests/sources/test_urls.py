"""URLs as vendors and users write them: what is connected to, and what is shown of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.addresses import with_plain_zone, without_zone
from saccade.sources import SourceError, check_source, open_source, redact
from saccade.sources.urls import RtspAddress, stream_name

# What is typed; host, port, user, password; what is requested; all of it shown as the request, unless stated otherwise.
VENDORS = [
    ("rtsp://admin:pw12@192.168.1.64:554/Streaming/Channels/101", "192.168.1.64", 554, "admin", "pw12"),  # Hikvision
    ("rtsp://admin:a@b@10.0.0.2/cam/realmonitor?channel=1&subtype=0", "10.0.0.2", 554, "admin", "a@b"),  # Dahua
    ("rtsp://root:p%40ss@cam.lan/axis-media/media.amp?videocodec=h264", "cam.lan", 554, "root", "p@ss"),  # Axis
    ("rtsp://admin:pw12@10.0.0.3:554/h264Preview_01_main", "10.0.0.3", 554, "admin", "pw12"),  # Reolink
    ("rtsp://user:pw#12@10.0.0.4:88/videoMain", "10.0.0.4", 88, "user", "pw#12"),  # Foscam
    ("rtsp://tapo:my pass@10.0.0.5:554/stream1", "10.0.0.5", 554, "tapo", "my pass"),  # Tapo
    ("rtsp://a:b@mediamtx:8554/yard@main?token@=1", "mediamtx", 8554, "a", "b"),  # MediaMTX
    ("rtsp://a:b@10.0.0.6/live@2?who=me@home.example", "10.0.0.6", 554, "a", "b"),
    ("rtsps://10.0.0.7:7441/Ab3dE?enableSrtp", "10.0.0.7", 7441, None, None),  # UniFi Protect
    ("rtsp://admin:@10.0.0.8/", "10.0.0.8", 554, "admin", ""),
    ("rtsp://me@10.0.0.8/live", "10.0.0.8", 554, "me", ""),
    ("RTSP://bob:p%40ss/w@cam:8554/live?x=1", "cam", 8554, "bob", "p@ss/w"),
    ("rtsp://bob:p@ss@cam:554/1", "cam", 554, "bob", "p@ss"),
    ("rtsp://bob:p@ss/word@cam/1", "cam", 554, "bob", "p@ss/word"),
    ("rtsp://bob:pass/word@cam/1", "cam", 554, "bob", "pass/word"),
    ("rtsp://bob:a?b@cam.lan/1", "cam.lan", 554, "bob", "a?b"),
    ("rtsp://[fe80::1]:8554/x", "fe80::1", 8554, None, None),
    ("rtsp://[fe80::1%eth0]:8554/x", "fe80::1%eth0", 8554, None, None),
    ("rtsp://[fe80::1%25eth0]/x", "fe80::1%eth0", 554, None, None),
    ("rtsp://u1:p1@[fe80::1%25en-0.5]/x", "fe80::1%en-0.5", 554, "u1", "p1"),
    ("rtsp://[fe80::1%25]/x", "fe80::1%25", 554, None, None),
    ("rtsp://[fe80::1%253]/x", "fe80::1%3", 554, None, None),
    ("rtsp://u1:p1@[2001:db8::1]/x", "2001:db8::1", 554, "u1", "p1"),
    ("rtsp://cam:554/a@b", "cam", 554, None, None),
    ("rtsps://cam", "cam", 322, None, None),
]


@pytest.mark.parametrize(("typed", "host", "port", "user", "password"), VENDORS)
def test_vendors_urls_are_parsed_and_shown_without_credentials(
    typed: str, host: str, port: int, user: str | None, password: str | None
) -> None:
    address = RtspAddress.parse(typed)
    assert (address.host, address.port, address.user, address.password) == (host, port, user, password)
    assert address.tls == typed.startswith("rtsps")
    path = with_plain_zone(typed).partition("://")[2].partition(host)[2]
    assert address.url.endswith(path.lstrip("]"))
    assert "%" not in address.url.partition("]")[0]  # a zone means nothing to the camera
    for shown in (redact(typed), repr(address), redact(f"{typed}: it does not answer")):
        assert host.partition("%")[0] in shown
        assert not user or f"{user}:" not in shown
        assert not password or password not in shown
    assert address.url in without_zone(redact(typed).replace("RTSP", "rtsp"))
    assert without_zone(address.with_zone) == address.url
    assert (host.partition("%")[0] == host) == (address.with_zone == address.url)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("open rtsp://bob@cam/1 or http://b:c@d/e", "open rtsp://cam/1 or http://d/e"),
        ("rtsp:/bob:pw12@cam/1", "rtsp:/cam/1"),
        ("rtsp:bob:pw12@cam/1", "rtsp:cam/1"),
        ("rtsp://cam:554/a@b", "rtsp://cam:554/a@b"),
        ("http://cam/video?user=bob&password=pass&x=1", "http://cam/video?user=bob&password=***&x=1"),
        ("http://cam/videostream.cgi?loginuse=bob&loginpas=pw12", "http://cam/videostream.cgi?loginuse=bob&loginpas=***"),
        ("rtsp://cam/user=bob&password=pw12&channel=1&stream=0.sdp", "rtsp://cam/user=bob&password=***&channel=1&stream=0.sdp"),
        ("rtsp://cam/user=bob_password=pw12_channel=1.sdp", "rtsp://cam/user=bob_password=***"),
        ("rtmp://cam/live?token=pass", "rtmp://cam/live?token=***"),
        ("rtmp://cam/live?token=…pass", "rtmp://cam/live?token=***"),
        ("srt://cam:9000?streamid=x&passphrase=longenough", "srt://cam:9000?streamid=x&passphrase=***"),
        ("https://cam/x?X-Amz-Signature=abc&sig=def&Expires=1", "https://cam/x?X-Amz-Signature=***&sig=***&Expires=1"),
        ("https://cam/x?api_key=abc;access_token=def", "https://cam/x?api_key=***;access_token=***"),
        ("use ws://HOST:PORT/PATH?token=…", "use ws://HOST:PORT/PATH?token=…"),
        ("write rtsp://user:password@host:554/path; @ as %40", "write rtsp://user:password@host:554/path; @ as %40"),
        ("no URL, but a mail to me@home.example", "no URL, but a mail to me@home.example"),
    ],
)  # fmt: skip
def test_secrets_are_redacted_and_hints_are_not(text: str, shown: str) -> None:
    assert redact(text) == shown


PRINTABLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=20)


@given(password=PRINTABLE.filter(lambda text: "***" not in text and not ("@" in text and set(text) & set("/?#"))))
def test_no_password_of_a_camera_with_an_address_is_shown(password: str) -> None:
    shown = redact(f"cannot open rtsp://bob:{password}@192.168.1.64:554/live: no answer")
    assert password not in shown


@given(st.text(max_size=80))
def test_redaction_and_parsing_never_raise_anything_else(text: str) -> None:
    redact(text)
    for url in (text, f"rtsp://{text}", f"rtsp://u:p@{text}/x"):
        try:
            address = RtspAddress.parse(url)
        except SourceError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert not any(ord(character) < 33 for character in address.url)


@pytest.mark.parametrize(
    "target",
    [
        "rtsp://", "rtsp://cam:99999/x", "rtsp://u:secret@cam:port/x", "webrtcs://u:secret@x", "rtsp://a..b/x",
        "rtsp://u:secret@a..b:554/x", "rtsp:///x", "rtsp://u:secret@cam/x\r\nEvil: 1", f"rtsp://{'a' * 64}.b/x",
        "http://u:secret@cam:99999/x", "srt://cam:65536", "rtmp://cam:0/live",
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [open_source, check_source])
def test_malformed_urls_are_refused_in_one_line(target: str, read: Callable[[str], object]) -> None:
    with pytest.raises(SourceError) as caught:
        read(target)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "url", "user"),
    [
        ("rtsp://cam.lan:9000/other", "rtsp://cam.lan:9000/other", "bob"),
        ("/other", "rtsp://cam.lan/other", "bob"),
        ("rtsp://evil.example/x", "rtsp://evil.example/x", None),
        ("rtsp://eve:pw@evil.example/x", "rtsp://evil.example/x", "eve"),
    ],
)
def test_a_redirect_keeps_credentials_to_the_same_host_only(location: str, url: str, user: str | None) -> None:
    address = RtspAddress.parse("rtsp://bob:pw12@cam.lan/live").redirected(location)
    assert (address.url, address.user) == (url, user)


def test_a_stream_is_named_after_host_and_path() -> None:
    assert stream_name("rtsp://bob:p@cam:8554/front/door?x=1") == "cam-8554-front-door"


@pytest.mark.parametrize("host", ["[fe80::1%]", "[fe80::1%25%]", "[fe80::1%eth0", "cam%eth0", "[::g%eth0]"])
def test_a_zone_that_cannot_be_one_is_refused(host: str) -> None:
    with pytest.raises(SourceError):
        RtspAddress.parse(f"rtsp://{host}/x")


def test_a_redirect_without_the_zone_keeps_it_and_the_password() -> None:
    address = RtspAddress.parse("rtsp://u1:p1@[fe80::1%25eth0]/a").redirected("rtsp://[fe80::1]:8554/b")
    assert (address.host, address.port, address.user) == ("fe80::1%eth0", 8554, "u1")
    assert address.with_credentials == "rtsp://u1:p1@[fe80::1%eth0]:8554/b"
