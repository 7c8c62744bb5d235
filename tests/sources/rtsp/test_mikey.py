"""Keys in MIKEY messages: one of a GStreamer server, and others made from it."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.rtsp.mikey import crypto_of
from saccade.sources.rtsp.sdp import parse_sdp

TEXT = (
    "AQAFAMmiW0kBAABN1C9zAAAAAAsA7rUJNDqekHkKEKdaDhj63tTkorhB7dn+aAQBAAAAFQABAQEBEAIBAQMBCgcBAQgBAQoBAQAAACIAIAAeSSq734be"
    "Uf7o2yBixzvXkfgn60xPrb1I70OTTx/lAA=="
)
MESSAGE = base64.b64decode(TEXT)
KEY = base64.b64encode(MESSAGE[-31:-1]).decode()
CRYPTO = f"AES_CM_128_HMAC_SHA1_80 inline:{KEY}"


def test_the_key_of_a_real_server_is_read() -> None:
    assert crypto_of(MESSAGE) == CRYPTO
    text = "v=0\n{}m=video 0 RTP/SAVP 96\na=rtpmap:96 H264/90000\n{}m=audio 0 RTP/SAVP 0\n"
    line = f"a=key-mgmt:mikey {TEXT}\n"
    assert [one.crypto for one in parse_sdp(text.format("", line), "rtsp://cam").medias] == [[CRYPTO], []]
    assert [one.crypto for one in parse_sdp(text.format(line, ""), "rtsp://cam").medias] == [[CRYPTO], [CRYPTO]]
    for bad in ("a=key-mgmt:mikey !\n", "a=key-mgmt:mikey QQ==\n", f"a=key-mgmt:other {TEXT}\n"):
        assert parse_sdp(text.format("", bad), "rtsp://cam").medias[0].crypto == []


def changed(at: int, value: int) -> bytes:
    return MESSAGE[:at] + bytes((value,)) + MESSAGE[at + 1 :]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "truncated"),
        (MESSAGE[:-10], "truncated"),
        (changed(0, 2), "unsupported version"),
        (changed(MESSAGE.index(b"\0\0\0\x22"), 0), None),
        (changed(MESSAGE.index(b"\0\0\0\x22") + 1, 1), "encrypted"),
        (changed(MESSAGE.index(b"\0\x20\0\x1e") + 1, 0x00), "master key"),
        (changed(MESSAGE.index(b"\1\1\1\1\x10") - 0 + 4, 32), "wrong size"),
        (changed(MESSAGE.index(b"\0\1\1\1\1\x10") + 2, 2), "unsupported cipher"),
    ],
)
def test_an_unusable_message_is_refused_with_the_reason(message: bytes, reason: str | None) -> None:
    if reason is None:
        assert crypto_of(message) == CRYPTO
        return
    with pytest.raises(ValueError, match=reason):
        crypto_of(message)


@given(st.binary(max_size=200) | st.builds(changed, st.integers(0, 100), st.integers(0, 255)))
def test_any_bytes_are_a_key_or_a_value_error(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert " inline:" in crypto_of(message)
