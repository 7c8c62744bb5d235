"""Depacketizer for audio over RTP: AAC (RFC 3640), Opus (RFC 7587), G.711 and G.722."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import dataclass

CODECS = {"MPEG4-GENERIC": "aac", "OPUS": "opus", "PCMA": "pcm_alaw", "PCMU": "pcm_mulaw", "G722": "adpcm_g722"}
"""FFmpeg's names of the supported audio codecs, by their names in SDP."""

_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)
_AAC_SAMPLES = 1024
_LONGEST = 1 << 16  # bytes of one piece of AAC that comes in several packets


@dataclass(slots=True, frozen=True)
class Piece:
    """One encoded audio frame.

    Attributes:
        timestamp: RTP timestamp of the first sample. It does not wrap around and may exceed 32 bits.
        data: the encoded audio for the decoder.
        samples: duration of the frame in units of the RTP clock: the number of samples per channel.
    """

    timestamp: int
    data: bytes
    samples: int


class AudioDepacketizer:
    """Extracts encoded audio from the RTP packets of one stream. The packets must be in order.

    Args:
        encoding: codec name in SDP, one of `CODECS`.
        rate: rate of the RTP clock in Hz.
        channels: number of channels.
        parameters: parameters of `a=fmtp`, with keys in lower case.

    Attributes:
        codec: FFmpeg's name of the codec.
        config: the AudioSpecificConfig of AAC; empty for other codecs.
        rate, channels: sample rate in Hz and number of channels of the audio.

    Raises:
        ValueError: if the codec is not supported.
    """

    def __init__(self, encoding: str, rate: int, channels: int, parameters: Mapping[str, str]) -> None:
        if encoding not in CODECS:
            raise ValueError(f"audio codec {encoding or '(missing in the SDP)'} is not supported")
        self.codec = CODECS[encoding]
        self.config = b""
        self.rate, self.channels = rate, channels
        self._sizes = (0, 0, 0)  # bits of an AU header: size, index of the first, index difference of the others
        self._samples = _AAC_SAMPLES
        self._parts: list[bytes] = []  # of a piece that comes in several packets
        if self.codec == "aac":
            self._read_aac(parameters)
        elif self.codec == "adpcm_g722":
            self.rate = 16000  # its RTP clock is 8000, by an old mistake in RFC 1890

    def push(self, timestamp: int, payload: bytes, *, marker: bool, gap: bool) -> list[Piece]:
        """Add an RTP packet of audio. Return the encoded audio frames that this packet completes.

        Args:
            timestamp: RTP timestamp of the packet.
            payload: payload of the packet.
            marker: whether the packet ends an audio frame.
            gap: whether packets before this packet were lost.
        """
        if self.codec == "aac":
            return self._aac(timestamp, payload, marker=marker, gap=gap)
        samples = opus_samples(payload) if self.codec == "opus" else len(payload) // self.channels
        return [Piece(timestamp, payload, samples)] if samples else []

    def _read_aac(self, parameters: Mapping[str, str]) -> None:
        try:
            self.config = binascii.unhexlify(parameters.get("config", ""))
            size, first, others = (int(parameters.get(f"{key}length", "0")) for key in ("size", "index", "indexdelta"))
            self._sizes = size, first, others
        except ValueError:
            self.config = b""
        if len(self.config) < 2 or max(self._sizes) > 32 or min(self._sizes) < 0:
            raise ValueError("the SDP has no valid parameter `config` for AAC audio")
        word = int.from_bytes(self.config[:2])
        number, channels = word >> 7 & 15, word >> 3 & 15
        if number < len(_RATES):
            self._samples = _AAC_SAMPLES * self.rate // _RATES[number]
        self.channels = 8 if channels == 7 else channels or self.channels

    def _aac(self, timestamp: int, payload: bytes, *, marker: bool, gap: bool) -> list[Piece]:
        if gap:
            self._parts = []
        first, rest = sum(self._sizes[:2]), self._sizes[0] + self._sizes[2]
        sizes = [len(payload)]
        if self._sizes[0]:
            bits = int.from_bytes(payload[:2])
            begin = 2 + (bits + 7) // 8
            headers = int.from_bytes(payload[2:begin]) >> (-bits % 8)
            payload, sizes, left, width = payload[begin:], [], bits, first
            while left >= width > 0:
                left -= width
                sizes.append(headers >> (left + width - self._sizes[0]) & ((1 << self._sizes[0]) - 1))
                width = rest
        if len(sizes) == 1 and (self._parts or sizes[0] > len(payload)):
            self._parts.append(payload)
            whole = b"".join(self._parts)
            if not marker and len(whole) < min(sizes[0], _LONGEST):
                return []
            self._parts = []
            return [Piece(timestamp, whole, self._samples)] if len(whole) == sizes[0] else []
        pieces, begin = [], 0
        for number, size in enumerate(sizes):
            if size and begin + size <= len(payload):
                data = payload[begin : begin + size]
                pieces.append(Piece(timestamp + number * self._samples, data, self._samples))
            begin += size
        return pieces


def opus_samples(data: bytes) -> int:
    """Return the number of samples per channel at 48 kHz in an Opus packet (RFC 6716, 3.1); 0 for an invalid packet."""
    if not data:
        return 0
    kind = data[0] >> 3
    if kind < 12:
        frame = (480, 960, 1920, 2880)[kind & 3]
    elif kind < 16:
        frame = (480, 960)[kind & 1]
    else:
        frame = (120, 240, 480, 960)[kind & 3]
    code = data[0] & 3
    count = 1 if code == 0 else 2 if code < 3 else data[1] & 63 if len(data) > 1 else 0
    return frame * count if frame * count <= 5760 else 0
