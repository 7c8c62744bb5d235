"""NAL unit types of H.264 (RFC 6184) and H.265 (RFC 7798), for depacketizing RTP."""

from __future__ import annotations

from dataclasses import dataclass

START_CODE = b"\x00\x00\x00\x01"
_SHORT_START_CODE = START_CODE[1:]


@dataclass(slots=True, frozen=True)
class NalSyntax:
    """How a depacketizer treats the NAL unit types of one codec.

    Attributes:
        header: size of a NAL unit's header in bytes.
        aggregate: RTP payload type that contains several NAL units.
        fragment: RTP payload type that contains a part of one NAL unit.
        unsupported: RTP payload types of the interleaved modes, which no camera sends.
        ignored: types that can be skipped: end of sequence, filler and undefined types.
        slices: types that contain a part of a frame.
        keys: slice types of frames that reference no other frame.
        openers: types of parameter sets and delimiters, which occur only at the beginning of an access unit.
        prefixes: other types that precede the first slice of their access unit.
        sets: parameter set types.
    """

    header: int
    aggregate: int
    fragment: int
    unsupported: frozenset[int]
    ignored: frozenset[int]
    slices: frozenset[int]
    keys: frozenset[int]
    openers: frozenset[int]
    prefixes: frozenset[int]
    sets: frozenset[int]

    def type_of(self, nal: bytes) -> int:
        """Return the type of a NAL unit or RTP payload, from its first byte."""
        return nal[0] >> 1 & 63 if self.header == 2 else nal[0] & 31

    def is_first_slice(self, nal: bytes) -> bool:
        """Return whether a slice NAL unit is the first slice of its frame."""
        return len(nal) > self.header and bool(nal[self.header] & 0x80)

    def is_key(self, nal: bytes) -> bool:
        """Return whether a NAL unit belongs to a keyframe, at which decoding can start."""
        kind = self.type_of(nal)
        return kind in self.keys or (self.header == 1 and kind == 6 and has_recovery_point(nal))


H264 = NalSyntax(
    header=1,
    aggregate=24,
    fragment=28,
    unsupported=frozenset({25, 26, 27, 29}),
    ignored=frozenset({0, 10, 11, 12, 22, 23, 30, 31}),
    slices=frozenset(range(1, 6)),
    keys=frozenset({5}),
    openers=frozenset({7, 9}),
    prefixes=frozenset({6, 8, 14, 15}),
    sets=frozenset({7}),
)
HEVC = NalSyntax(
    header=2,
    aggregate=48,
    fragment=49,
    unsupported=frozenset({50}),
    ignored=frozenset({36, 37, 38, *range(41, 48), *range(51, 64)}),
    slices=frozenset(range(32)),
    keys=frozenset(range(16, 22)),
    openers=frozenset({32, 35}),
    prefixes=frozenset({33, 34, 39}),
    sets=frozenset({32, 33}),
)


def split_annex_b(nal: bytes) -> list[bytes]:
    """Split a NAL unit at start codes inside it. Some cameras send several NAL units as one."""
    if _SHORT_START_CODE not in nal:
        return [nal]
    return [part for part in (piece.rstrip(b"\0") for piece in nal.split(_SHORT_START_CODE)) if part]


def has_recovery_point(sei: bytes) -> bool:
    """Return whether an H.264 SEI unit marks a recovery point, at which decoding can start without an IDR frame.

    Cameras with gradual decoder refresh never send an IDR frame.
    """
    at = 1
    while at + 2 < len(sei):
        kind = size = 0
        while at < len(sei) and sei[at] == 255:
            kind, at = kind + 255, at + 1
        kind, at = kind + sum(sei[at : at + 1]), at + 1
        while at < len(sei) and sei[at] == 255:
            size, at = size + 255, at + 1
        size, at = size + sum(sei[at : at + 1]), at + 1
        if kind == 6:
            return True
        at += size
    return False
