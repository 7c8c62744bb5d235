"""Reads the SRTP key from a MIKEY message (RFC 3830) in a session description (RFC 4567), as Axis cameras send it.

The key in the message must be unencrypted. The camera should therefore send the description over TLS.
"""

from __future__ import annotations

import base64
import struct

_TIMESTAMP, _KEMAC, _POLICY, _RAND = 5, 1, 10, 11
_TIMESTAMP_SIZES = {0: 8, 1: 8, 2: 4}
_TGK_SALT, _TEK, _TEK_SALT = 1, 2, 3
_ENC_ALG, _KEY_SIZE, _SALT_SIZE, _TAG_SIZE = 0, 1, 4, 11
_AES_CM, _AES_GCM = 1, 6


class _Reader:
    """Reads consecutive fields of a MIKEY message. Reading past the end raises ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise ValueError("the MIKEY message is truncated")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")


def crypto_of(message: bytes) -> str:
    """Convert the SRTP key of a MIKEY message to the value of an SDP `a=crypto` line (without the line's tag).

    Raises:
        ValueError: if the message is malformed, the key is encrypted, or the cipher is unknown.
    """
    reader = _Reader(message)
    version, _, kind, _, _, count, maps = struct.unpack(">BBBBIBB", reader.take(10))
    if version != 1 or maps != 0:
        raise ValueError("the MIKEY message has an unsupported version or CS ID map type")
    reader.take(9 * count)  # policy, SSRC and rollover counter of each crypto session
    policy: dict[int, int] = {}
    keys = b""
    while kind:
        now, kind = kind, reader.number(1)
        if now == _TIMESTAMP:
            size = _TIMESTAMP_SIZES.get(reader.number(1))
            if size is None:
                raise ValueError("the MIKEY message has an unknown timestamp type")
            reader.take(size)
        elif now == _RAND:
            reader.take(reader.number(1))
        elif now == _POLICY:
            reader.take(2)
            fields = _Reader(reader.take(reader.number(2)))
            while fields.left:
                policy.setdefault(fields.number(1), fields.number(fields.number(1)))
        elif now == _KEMAC:
            if reader.number(1) != 0:
                raise ValueError("the key in the MIKEY message is encrypted")
            keys = reader.take(reader.number(2))
            break
        else:
            raise ValueError(f"the MIKEY message has an unknown payload type {now}")
    return _crypto(policy, *_key(keys))


def _key(data: bytes) -> tuple[int, bytes, bytes]:
    """Return the type, the key and the salt of the first key in a MIKEY payload."""
    reader = _Reader(data)
    reader.take(1)
    kind = reader.number(1) >> 4
    key = reader.take(reader.number(2))
    return kind, key, reader.take(reader.number(2)) if kind in (_TGK_SALT, _TEK_SALT) else b""


def _crypto(policy: dict[int, int], kind: int, key: bytes, salt: bytes) -> str:
    gcm = policy.get(_ENC_ALG, _AES_CM) == _AES_GCM
    if not gcm and policy.get(_ENC_ALG, _AES_CM) != _AES_CM:
        raise ValueError("the MIKEY message has an unsupported cipher; supported are AES-CM and AES-GCM")
    sizes = policy.get(_KEY_SIZE, 16), policy.get(_SALT_SIZE, 12 if gcm else 14)
    if kind not in (_TEK, _TEK_SALT):
        raise ValueError("the MIKEY message has a TGK (TEK generation key); only a TEK (SRTP master key) is supported")
    key += salt
    if len(key) != sum(sizes):
        raise ValueError("the key in the MIKEY message has the wrong size")
    if gcm:
        suite = f"AEAD_AES_{8 * sizes[0]}_GCM"
    else:
        suite = f"AES_CM_{8 * sizes[0]}_HMAC_SHA1_{8 * policy.get(_TAG_SIZE, 10)}"
    return f"{suite} inline:{base64.b64encode(key).decode()}"
