"""Depacketizer for H.264 (RFC 6184) and H.265 (RFC 7798)."""

from __future__ import annotations

from typing import Literal

from saccade.sources.rtp.depacketizer import Depacketizer
from saccade.sources.rtp.nal import H264, HEVC, START_CODE, split_annex_b

Codec = Literal["h264", "hevc"]


class H26xDepacketizer(Depacketizer):
    """Assembles access units of H.264 or H.265, with a start code before each NAL unit (Annex B).

    Packets without frame data (padding, filler, end of sequence, undefined types) do not count as damage.

    Args:
        codec: "h264" or "hevc".
        show_damaged, trust_marker: see `Depacketizer`.
    """

    def __init__(self, codec: Codec, *, show_damaged: bool = False, trust_marker: bool = False) -> None:
        super().__init__(codec, show_damaged=show_damaged, trust_marker=trust_marker)
        self._syntax = HEVC if codec == "hevc" else H264
        self._in_band_sets = False

    def _begins_unit(self, payload: bytes) -> bool:
        syntax = self._syntax
        nal = _first_nal(payload)
        if syntax.type_of(nal) == syntax.aggregate:
            nal = payload[syntax.header + 2 :] or nal
        kind = syntax.type_of(nal)
        if kind in syntax.openers:
            return True
        if self._dropped is not None and self._in_band_sets:
            return False  # this sender repeats parameter sets before each keyframe, and they may be missing
        if kind == syntax.fragment:
            return len(nal) > syntax.header + 1 and bool(nal[syntax.header] & nal[syntax.header + 1] & 0x80)
        return kind in syntax.prefixes or (kind in syntax.slices and syntax.is_first_slice(nal))

    def _is_known(self, payload: bytes) -> bool:
        if not payload:
            return False
        # 0 is an undefined type, but also the first byte of a start code.
        return self._syntax.type_of(payload) not in self._syntax.ignored or payload.startswith(b"\0\0")

    def _holds_slices(self, payload: bytes) -> bool:
        syntax = self._syntax
        if not payload:
            return False
        nal = _first_nal(payload)
        kind = syntax.type_of(nal)
        if kind == syntax.fragment:
            flags = payload[syntax.header : syntax.header + 1]
            return bool(flags) and flags[0] & (63 if syntax.header == 2 else 31) in syntax.slices
        if kind == syntax.aggregate:
            inner = payload[syntax.header + 2 :]
            return bool(inner) and syntax.type_of(inner) in syntax.slices
        return kind in syntax.slices

    def _parse(self, payload: bytes) -> bool:
        syntax = self._syntax
        kind = syntax.type_of(payload)
        if len(payload) < syntax.header or kind in syntax.unsupported:
            return False
        if kind == syntax.fragment:
            return self._parse_fragment(payload)
        if self._fragments:
            return False  # a fragmented NAL unit without an end
        if kind == syntax.aggregate:
            return self._parse_aggregate(payload)
        self._add(payload)
        return True

    def _parse_aggregate(self, payload: bytes) -> bool:
        at = self._syntax.header
        while at < len(payload):
            begin = at + 2
            at = begin + int.from_bytes(payload[at:begin], "big")
            if at - begin < self._syntax.header or at > len(payload):
                return False
            self._add(payload[begin:at])
        return True

    def _parse_fragment(self, payload: bytes) -> bool:
        header = self._syntax.header
        if len(payload) <= header:
            return False
        flags = payload[header]
        begins, ends = flags & 0x80, flags & 0x40
        if bool(begins) == bool(self._fragments):
            self._fragments = []
            return False  # a start inside another fragment, or a middle without a start
        if begins and header == 2:
            self._fragments.append(bytes((payload[0] & 0x81 | (flags & 63) << 1, payload[1])))
        elif begins:
            self._fragments.append(bytes((payload[0] & 0xE0 | flags & 31,)))
        self._fragments.append(payload[header + 1 :])
        self._size += len(payload)
        if ends:
            nal, self._fragments = b"".join(self._fragments), []
            self._size -= len(nal)
            self._add(nal)
        return True

    def _add(self, data: bytes) -> None:
        syntax = self._syntax
        for nal in split_annex_b(data):
            kind = syntax.type_of(nal)
            if kind in syntax.ignored:
                continue
            self._parts += (START_CODE, nal)
            self._size += len(nal)
            self._has_slices |= kind in syntax.slices
            self._in_band_sets |= kind in syntax.sets
            self._key = self._key or syntax.is_key(nal)


def _first_nal(payload: bytes) -> bytes:
    """Remove the start code that some senders wrongly put before the first NAL unit of a payload."""
    return (split_annex_b(payload) or [payload])[0] if payload.startswith(b"\0\0") else payload
