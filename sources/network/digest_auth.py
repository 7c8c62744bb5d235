"""Client authentication for RTSP and HTTP: Basic and Digest (RFC 7616 with MD5, SHA-256 and their `-sess` variants)."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Sequence

_HASHES = {"MD5": hashlib.md5, "SHA-256": hashlib.sha256}


class Credentials:
    """User name and password, with the server's latest authentication challenge (Basic or Digest)."""

    def __init__(self, user: str, password: str) -> None:
        self._user = user
        self._password = password
        self._scheme = ""
        self._challenge: dict[str, str] = {}
        self._count = 0
        self._cnonce = ""

    def challenge(self, challenges: Sequence[str]) -> bool:
        """Store the strongest supported challenge of the server. Return False if none is supported.

        Args:
            challenges: values of the `WWW-Authenticate` headers.
        """
        best = -1
        for challenge in challenges:
            scheme, _, rest = challenge.strip().partition(" ")
            fields = {
                key.lower(): quoted or bare
                for key, quoted, bare in re.findall(r'([\w-]+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))', rest)
            }
            algorithm = fields.get("algorithm", "MD5").upper().removesuffix("-SESS")
            if scheme.lower() == "basic":
                rank = 0
            elif scheme.lower() == "digest" and algorithm in _HASHES and fields.get("nonce"):
                rank = 1 + (algorithm == "SHA-256")
            else:
                continue
            if rank > best:
                best, self._scheme, self._challenge, self._count = rank, scheme.lower(), fields, 0
                self._cnonce = secrets.token_hex(8)  # for all requests of the challenge, as its session key is
        return best >= 0

    @property
    def stale(self) -> bool:
        """Whether the server rejected the last request because its nonce had expired, not because of the password."""
        return self._challenge.get("stale", "").lower() == "true"

    def authorization(self, method: str, uri: str) -> str | None:
        """Return the value of a request's `Authorization` header; None before the server's first challenge."""
        if not self._scheme:
            return None
        if self._scheme == "basic":
            return "Basic " + base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        challenge = self._challenge
        algorithm = challenge.get("algorithm", "MD5").upper()
        hashed = _HASHES[algorithm.removesuffix("-SESS")]
        realm, nonce = challenge.get("realm", ""), challenge["nonce"]

        def digest(text: str) -> str:
            return hashed(text.encode()).hexdigest()

        secret, request = digest(f"{self._user}:{realm}:{self._password}"), digest(f"{method}:{uri}")
        if algorithm.endswith("-SESS"):
            secret = digest(f"{secret}:{nonce}:{self._cnonce}")
        fields = {"username": self._user, "realm": realm, "nonce": nonce, "uri": uri}
        extra = ""
        if "auth" in re.split(r"[\s,]+", challenge.get("qop", "")):
            self._count += 1
            count = f"{self._count:08x}"
            response = digest(f"{secret}:{nonce}:{count}:{self._cnonce}:auth:{request}")
            fields |= {"response": response, "cnonce": self._cnonce}
            extra = f", qop=auth, nc={count}"
        else:
            fields["response"] = digest(f"{secret}:{nonce}:{request}")
            if algorithm.endswith("-SESS"):
                fields["cnonce"] = self._cnonce
        if "opaque" in challenge:
            fields["opaque"] = challenge["opaque"]
        if "algorithm" in challenge:
            extra += f", algorithm={challenge['algorithm']}"
        return "Digest " + ", ".join(f'{key}="{value}"' for key, value in fields.items()) + extra
