"""Reads and writes fragmented MP4: the initialization segment (header) and the fragments."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av

VIDEO, SOUND = 1, 2
"""Track numbers in an MP4."""

VIDEO_SCALE = 90_000
_NOTE = bytes.fromhex("5acca0de7e0d4f6ab1f2c0deca3e2a01")  # which `uuid` box is ours
_KEY, _NO_KEY = 0x02000000, 0x01010000  # sample flags: depends on no other; depends on others, is no sync sample
_SAMPLE = struct.Struct(">IIIi")


@dataclass(slots=True, frozen=True)
class Sample:
    """One encoded video frame or audio packet, for an MP4 fragment.

    Attributes:
        data: encoded data in MP4 format.
        duration: time until the next sample, in units of the track.
        offset: presentation time minus decoding time, in the same units; may be negative.
        key: whether decoding can start at this sample.
    """

    data: bytes
    duration: int
    offset: int = 0
    key: bool = True


@dataclass(slots=True, frozen=True)
class AudioTrackInfo:
    """Description of an MP4's audio track.

    Attributes:
        codec: `aac` or `opus`.
        config: the AudioSpecificConfig of AAC.
        rate: samples per second, which is the time scale of the track.
        channels: number of channels.
    """

    codec: str
    config: bytes
    rate: int
    channels: int


def head_of(
    codec: str,
    first: bytes,
    *,
    sound: AudioTrackInfo | None,
    note: Mapping[str, Any],
    display_matrix: tuple[int, ...] | None = None,
    pixel_aspect: Fraction | None = None,
) -> bytes:
    """Build the header (initialization segment) of a fragmented MP4, which precedes the first fragment.

    Args:
        codec: `h264` or `hevc`.
        first: parameter sets and the first frames, with start codes.
        sound: the audio track; None for no audio.
        note: JSON values to store in the file; see `note_in`.
        display_matrix: display matrix, see `CodedPacket`.
        pixel_aspect: pixel width divided by pixel height, see `CodedPacket`.

    Raises:
        FFmpegError: if FFmpeg cannot parse the parameter sets.
        ValueError: if `first` contains no parameter sets.
    """
    written = io.BytesIO()
    options = {"movflags": "empty_moov+default_base_moof+frag_custom", "video_track_timescale": str(VIDEO_SCALE)}
    with av.open(io.BytesIO(first), format=codec) as shown, av.open(written, "w", format="mp4", options=options) as out:
        template = shown.streams.video[0]
        if not template.width:
            raise ValueError(f"the {codec} packet contains no parameter sets (SPS and PPS)")
        stream = out.add_stream_from_template(template)
        stream.time_base = Fraction(1, VIDEO_SCALE)
        stream.codec_context.codec_tag = "avc1" if codec == "h264" else "hvc1"  # Safari plays no `hev1`
        if display_matrix is not None:
            stream.set_display_matrix(display_matrix)
        if pixel_aspect:
            stream.sample_aspect_ratio = pixel_aspect
        out.start_encoding()
    boxes = dict(reversed(list(boxes_in(written.getvalue()))))
    moov = boxes[b"moov"]
    if sound is not None:
        parts = list(boxes_in(moov))
        at = next(n for n, (kind, _) in enumerate(parts) if kind == b"mvex")
        trex = _full(b"trex", 0, 0, struct.pack(">IIIII", SOUND, 1, 0, 0, 0))
        parts[at] = b"mvex", parts[at][1] + trex
        parts.insert(at, (b"trak", _sound_trak(sound)))
        moov = b"".join(_box(*part) for part in parts)
    ours = _box(b"uuid", _NOTE, json.dumps(note).encode())
    return _box(b"ftyp", boxes[b"ftyp"]) + ours + _box(b"moov", moov)


def sound_head_of(sound: AudioTrackInfo) -> bytes:
    """Build the header of an MP4 with only an audio track, as input for PyAV."""
    return _box(b"ftyp", b"isom", bytes(4), b"isom") + _box(b"moov", _box(b"trak", _sound_trak(sound)))


def fragment_of(number: int, tracks: Sequence[tuple[int, int, Sequence[Sample]]]) -> bytes:
    """Build one MP4 fragment (`moof` and `mdat`).

    Args:
        number: number of the fragment in its file, from 1.
        tracks: (track number, decoding time of the first sample in units of the track, samples) for each track.
    """
    # FFmpeg's muxer is not used, because it decides when to write, and cannot recover from a full disk.
    runs = [(track, start, samples) for track, start, samples in tracks if samples]
    headers = [
        (
            _full(b"tfhd", 0, 0x020000, struct.pack(">I", track)) + _full(b"tfdt", 1, 0, struct.pack(">Q", start)),
            b"".join(
                _SAMPLE.pack(one.duration, len(one.data), _KEY if one.key else _NO_KEY, one.offset) for one in samples
            ),
            len(samples),
        )
        for track, start, samples in runs
    ]
    sequence = _full(b"mfhd", 0, 0, struct.pack(">I", number))
    # Of each track: traf's head, tfhd and tfdt, and trun with its head, flags, count and place of the data.
    size = 8 + len(sequence) + sum(8 + len(head) + 8 + 12 + len(rows) for head, rows, _ in headers)
    place, trafs = size + 8, []
    for (head, rows, count), (_, _, samples) in zip(headers, runs, strict=True):
        trafs.append(_box(b"traf", head, _full(b"trun", 1, 0xF01, struct.pack(">Ii", count, place), rows)))
        place += sum(len(one.data) for one in samples)
    data = [one.data for _, _, samples in runs for one in samples]
    return b"".join([_box(b"moof", sequence, *trafs), (place - size).to_bytes(4), b"mdat", *data])


def event_of(number: int, at: int, message: bytes) -> bytes:
    """Build an event message box (`emsg`, ISO 23009-1) for a fragmented MP4.

    Args:
        number: ID of the message.
        at: presentation time of the message, in units of 1/90000 s.
        message: content of the message.
    """
    place = struct.pack(">IQII", VIDEO_SCALE, at, 0, number)
    return _full(b"emsg", 1, 0, place, b"urn:saccade:record\0", b"\0", message)


def length_prefixed(data: bytes) -> bytes:
    """Convert H.264 or H.265 data from start codes (Annex B) to MP4 format, where a length precedes each NAL unit."""
    units = [unit.rstrip(b"\0") for unit in data.split(b"\0\0\1")[1:]]  # no unit ends in a zero
    return b"".join(part for unit in units if unit for part in (len(unit).to_bytes(4), unit))


# ---- read again


@dataclass(slots=True, frozen=True)
class Timing:
    """Time range of the video in an MP4 fragment.

    Attributes:
        start: decoding time of the first frame, in units of 1/90000 s.
        duration: duration in units of 1/90000 s.
        key: whether decoding can start at the first frame.
    """

    start: int
    duration: int
    key: bool


def boxes_in(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the type and the content of each complete MP4 box in `data`."""
    found, at = [], 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        if size < 8 or at + size > len(data):
            break
        found.append((data[at + 4 : at + 8], data[at + 8 : at + size]))
        at += size
    return found


def note_in(head: bytes) -> dict[str, Any] | None:
    """Return the JSON values that Saccade stored in the header of an MP4; None if another program wrote the file."""
    for kind, content in boxes_in(head):
        if kind == b"uuid" and content[:16] == _NOTE:
            note = json.loads(content[16:])
            return note if isinstance(note, dict) else None
    return None


def timing_of(moof: bytes) -> Timing | None:
    """Return the time range of the video in a `moof` box (without its header); None if the fragment has no video."""
    for kind, content in boxes_in(moof):
        if kind != b"traf":
            continue
        parts = dict(boxes_in(content))
        if int.from_bytes(parts[b"tfhd"][4:8]) != VIDEO:
            continue
        start, trun = int.from_bytes(parts[b"tfdt"][4:12]), parts[b"trun"]
        samples = list(_SAMPLE.iter_unpack(trun[12:]))
        return Timing(start, sum(one[0] for one in samples), samples[0][2] == _KEY)
    return None


def codecs_of(head: bytes) -> str:
    """Return the codecs string (RFC 6381) for the header of an MP4, such as `avc1.640028,mp4a.40.2`."""
    found = []
    if (at := head.find(b"avcC")) > 0:
        found.append("avc1." + head[at + 5 : at + 8].hex())
    elif (at := head.find(b"hvcC")) > 0:
        profile, flags, limits = head[at + 5], int.from_bytes(head[at + 6 : at + 10]), head[at + 10 : at + 16]
        space = ("", "A", "B", "C")[profile >> 6]
        compatible = int(f"{flags:032b}"[::-1], 2)
        tier = "H" if profile & 0x20 else "L"
        more = "".join(f".{byte:X}" for byte in limits.rstrip(b"\0"))
        found.append(f"hvc1.{space}{profile & 31}.{compatible:X}.{tier}{head[at + 16]}{more}")
    if (at := head.find(b"esds")) > 0:
        config = head.find(b"\x05", head.find(b"\x40\x15", at)) + 5
        kind = head[config] >> 3
        found.append(f"mp4a.40.{kind}")
    elif b"dOps" in head:
        found.append("opus")
    return ",".join(found)


# ---- boxes


def _box(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return (8 + len(content)).to_bytes(4) + kind + content


def _full(kind: bytes, version: int, flags: int, *parts: bytes) -> bytes:
    return _box(kind, bytes((version,)), flags.to_bytes(3), *parts)


def _descriptor(tag: int, content: bytes) -> bytes:
    return bytes((tag, 0x80, 0x80, 0x80, len(content))) + content


def _sound_trak(sound: AudioTrackInfo) -> bytes:
    """Build the content of the MP4 box `trak` for audio (ISO 14496-12 and -14; Opus in ISOBMFF)."""
    matrix = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    tkhd = _full(b"tkhd", 0, 3, struct.pack(">IIIII8xHHH2x", 0, 0, SOUND, 0, 0, 0, 1, 0x100), matrix, bytes(8))
    mdhd = _full(b"mdhd", 0, 0, struct.pack(">IIIIHH", 0, 0, sound.rate, 0, 0x55C4, 0))
    hdlr = _full(b"hdlr", 0, 0, bytes(4), b"soun", bytes(12), b"sound\0")
    entry = struct.pack(">6xH8xHH4xI", 1, sound.channels, 16, sound.rate << 16 if sound.rate < 1 << 16 else 0)
    if sound.codec == "opus":
        description = _box(b"Opus", entry, _box(b"dOps", struct.pack(">BBHIhB", 0, sound.channels, 312, 48000, 0, 0)))
    else:
        decoder = struct.pack(">BBHBII", 0x40, 0x15, 0, 0, 0, 0) + _descriptor(5, sound.config)
        whole = _descriptor(3, struct.pack(">HB", 0, 0) + _descriptor(4, decoder) + _descriptor(6, b"\x02"))
        description = _box(b"mp4a", entry, _full(b"esds", 0, 0, whole))
    nothing = bytes(4)
    stbl = _box(
        b"stbl",
        _full(b"stsd", 0, 0, (1).to_bytes(4), description),
        _full(b"stts", 0, 0, nothing),
        _full(b"stsc", 0, 0, nothing),
        _full(b"stsz", 0, 0, nothing, nothing),
        _full(b"stco", 0, 0, nothing),
    )
    dref = _full(b"dref", 0, 0, (1).to_bytes(4), _full(b"url ", 0, 1))
    minf = _box(b"minf", _full(b"smhd", 0, 0, nothing), _box(b"dinf", dref), stbl)
    return tkhd + _box(b"mdia", mdhd, hdlr, minf)
