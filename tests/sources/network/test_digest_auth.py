"""Authentication of RTSP requests."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any

from saccade.sources.network.digest_auth import Credentials


def test_a_digest_equals_the_standards_example() -> None:
    # RFC 2617, 3.5, without the qop, whose cnonce is ours.
    credentials = Credentials("Mufasa", "Circle Of Life")
    assert credentials.authorization("GET", "/") is None
    digest = 'Digest realm="testrealm@host.com", nonce="dcd98b", opaque="5ccc"'
    assert credentials.challenge(['Basic realm="x"', digest])
    header = credentials.authorization("GET", "/dir/index.html") or ""
    secret = hashlib.md5(b"Mufasa:testrealm@host.com:Circle Of Life").hexdigest()
    request = hashlib.md5(b"GET:/dir/index.html").hexdigest()
    assert f'response="{hashlib.md5(f"{secret}:dcd98b:{request}".encode()).hexdigest()}"' in header
    assert 'opaque="5ccc"' in header
    assert "Circle" not in header
    assert credentials.challenge(['Digest realm="r", nonce="n", algorithm=SHA-256, qop="auth"'])
    assert "qop=auth, nc=00000001" in (credentials.authorization("PLAY", "x") or "")
    assert not credentials.challenge(["Negotiate"])


def test_a_camera_that_knows_only_basic_gets_that() -> None:
    credentials = Credentials("bob", "p:w")
    assert credentials.challenge(['Basic realm="x"'])
    assert credentials.authorization("PLAY", "x") == "Basic " + base64.b64encode(b"bob:p:w").decode()


def test_a_session_digest_equals_the_standards_formula() -> None:
    """RFC 7616, 3.4.2: the key holds the first client nonce, and the server may keep the key."""
    for name, hashed in (("MD5-sess", hashlib.md5), ("SHA-256-sess", hashlib.sha256)):
        credentials = Credentials("Mufasa", "Circle Of Life")
        assert credentials.challenge([f'Digest realm="r", nonce="n", algorithm={name}, qop="auth"'])
        nonces = set()
        for count in (1, 2):
            header = credentials.authorization("PLAY", "rtsp://cam/x") or ""
            fields = dict(re.findall(r'(\w+)="?([^",]*)"?', header))
            nonces.add(fields["cnonce"])

            def digest(text: str, hashed: Callable[[bytes], Any] = hashed) -> str:
                return str(hashed(text.encode()).hexdigest())

            key = digest(f"{digest('Mufasa:r:Circle Of Life')}:n:{fields['cnonce']}")
            request = digest("PLAY:rtsp://cam/x")
            assert fields["response"] == digest(f"{key}:n:{count:08x}:{fields['cnonce']}:auth:{request}")
            assert (fields["nc"], fields["algorithm"]) == (f"{count:08x}", name)
        assert len(nonces) == 1
