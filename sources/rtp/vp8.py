"""Depacketizer for VP8 (RFC 7741)."""

from __future__ import annotations

from saccade.sources.rtp.depacketizer import Depacketizer

_KEY_START_CODE = b"\x9d\x01\x2a"


class Vp8Depacketizer(Depacketizer):
    """Assembles VP8 frames from RTP packets.

    Args:
        trust_marker: see `Depacketizer`.
    """

    def __init__(self, *, trust_marker: bool = False) -> None:
        super().__init__("vp8", trust_marker=trust_marker)

    def _is_known(self, payload: bytes) -> bool:
        return len(payload) > _descriptor_size(payload)

    def _holds_slices(self, payload: bytes) -> bool:
        return self._is_known(payload)

    def _begins_unit(self, payload: bytes) -> bool:
        return payload[0] & 0x17 == 0x10  # the start of the first partition

    def _parse(self, payload: bytes) -> bool:
        data = payload[_descriptor_size(payload) :]
        if not self._parts:
            self._key = not data[0] & 1 and data[3:6] == _KEY_START_CODE
        self._parts.append(data)
        self._size += len(data)
        self._has_slices = True
        return True


def _descriptor_size(payload: bytes) -> int:
    """Return the size in bytes of the payload descriptor, which precedes the data."""
    if not payload[:1] or not payload[0] & 0x80:
        return 1
    flags, picture_id = (payload[1:3] + b"\0\0")[:2]
    long_id = flags & picture_id & 0x80
    return 2 + bool(flags & 0x80) + bool(long_id) + bool(flags & 0x40) + bool(flags & 0x30)
