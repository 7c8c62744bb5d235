"""Reads a stream's recording: lists its files and gaps, and exports time ranges as one MP4 or as HLS.

There is no index file. Each MP4 contains its start time as metadata. A file that is still being written is readable up
to its last complete fragment.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import av.error

from saccade.sinks.recording.place import RecordingPlace
from saccade.sinks.video.fragments import VIDEO_SCALE, boxes_in, codecs_of, note_in, timing_of
from saccade.sinks.video.muxer import Muxer

_HEAD_BYTES = 8192
_LONGEST_FILE_S = 6 * 3600.0  # a file that began longer before what is asked for has nothing of it
_SEGMENT_S = 4.0  # of HLS, at least; up to the next keyframe
_GROWS_S = 10.0  # a segment that ended longer ago does not get longer
_CONTINUOUS_S = 1.5  # files this close have no gap between them
MOST_BYTES = 4 << 30
"""Maximum size of an exported MP4 in bytes, because it is first written to a temporary file."""


class ArchiveError(Exception):
    """Raised if a requested part of a recording is not available. The message is one line for the user.

    Attributes:
        missing: whether nothing was recorded at the requested time.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(slots=True, frozen=True)
class Fragment:
    """A fragment of an MP4: its byte range in the file, and its start time and duration in seconds."""

    offset: int
    size: int
    start: float
    duration: float
    key: bool


@dataclass(slots=True, frozen=True)
class RecordedFile:
    """One file of a recording, with its complete fragments.

    Attributes:
        path: path of the file.
        began: Unix time of the first frame, in seconds.
        number: sequence number of the file within its stream.
        after: reason for the gap between the previous file and this file; None if there is no gap.
        form: video format. Files with the same format can be joined into one MP4.
        head: MP4 initialization segment: the bytes before the first fragment.
        fragments: complete fragments, oldest first.
    """

    path: Path
    began: float
    number: int
    after: str | None
    form: str
    head: bytes
    fragments: tuple[Fragment, ...]

    @property
    def ended(self) -> float:
        """Unix time of the end of the last complete fragment, in seconds."""
        last = self.fragments[-1] if self.fragments else None
        return self.began + (last.start + last.duration if last else 0.0)

    @property
    def codecs(self) -> str:
        """Codecs of the file as browsers expect them (RFC 6381), such as `avc1.640028`."""
        return codecs_of(self.head)

    def within(self, since: float, until: float) -> RecordedFile:
        """Return a copy with only the fragments between two Unix times, in seconds.

        The first fragment starts at a keyframe, so it may start before `since`.
        """
        first = 0
        for number, one in enumerate(self.fragments):
            if one.key and self.began + one.start <= since:
                first = number
        kept = [one for one in self.fragments[first:] if self.began + one.start < until]
        return replace(self, fragments=tuple(kept))


@dataclass(slots=True, frozen=True)
class Part:
    """An HLS segment: a byte range of a recorded file that starts at a keyframe.

    Attributes:
        file: recorded file that contains the segment.
        offset, size: byte range in the file.
        start: start time in seconds, relative to the start of the file.
        duration: duration in seconds.
    """

    file: RecordedFile
    offset: int
    size: int
    start: float
    duration: float


@dataclass(slots=True, frozen=True)
class Span:
    """A time range that was recorded without a gap.

    Attributes:
        begin, end: Unix times in seconds.
        after: reason for the gap before the range; None if there is no gap or the reason is unknown.
    """

    begin: float
    end: float
    after: str | None


class Archive:
    """Reader of one stream's recording. Thread-safe."""

    def __init__(self, place: RecordingPlace) -> None:
        self._place = place
        self._lock = threading.Lock()  # over what is known of the files
        self._known: dict[Path, tuple[int, RecordedFile]] = {}  # inode and what was read

    @property
    def root(self) -> Path:
        """Folder that contains all files of the recording."""
        return self._place.names.root

    @property
    def last_number(self) -> int:
        """Highest sequence number of the recorded files; 0 if there are no files."""
        with self._lock:
            self._read_heads()
            return max((one.number for _, one in self._known.values()), default=0)

    def files(self, since: float, until: float) -> list[RecordedFile]:
        """Return the files that were recorded between two Unix times in seconds, oldest first."""
        with self._lock:
            self._read_heads()
            near = [path for path, (_, one) in self._known.items() if since - _LONGEST_FILE_S < one.began < until]
            for path in near:
                self._read_fragments(path)
            found = [self._known[path][1] for path in near if path in self._known]
        overlapping = (one.within(since, until) for one in found if one.ended > since)
        return sorted((one for one in overlapping if one.fragments), key=lambda one: one.number)

    def open_file(self, name: str) -> BinaryIO:
        """Open a recorded file for reading, by its name relative to `root`.

        Raises:
            ArchiveError: if there is no such file.
        """
        path = self.root / name
        with self._lock:
            self._read_heads()
            known = path in self._known
        with suppress(FileNotFoundError):  # retention may delete it meanwhile
            if known:
                return path.open("rb")
        raise ArchiveError(f"the recording has no file '{name[:80]}'", missing=True)

    def spans(self, since: float, until: float) -> list[Span]:
        """Return the recorded time ranges (without gaps) between two Unix times in seconds."""
        spans: list[Span] = []
        for one, ended in self._times(since, until):
            begin, end = max(one.began, since), min(ended, until)
            if end <= begin:
                continue
            if spans and -_CONTINUOUS_S < begin - spans[-1].end < _CONTINUOUS_S:
                spans[-1] = Span(spans[-1].begin, max(end, spans[-1].end), spans[-1].after)
            else:
                spans.append(Span(begin, end, one.after))
        return spans

    def _times(self, since: float, until: float) -> list[tuple[RecordedFile, float]]:
        """Return the files that can overlap a time range, oldest first, each with its end as Unix time in seconds."""
        with self._lock:
            self._read_heads()
            near = [one for _, one in self._known.values() if since - _LONGEST_FILE_S < one.began < until]
            near.sort(key=lambda one: one.number)
            found = []
            for one, after in itertools.zip_longest(near, near[1:]):
                # Where nothing is missing before the next file, its head tells the end of this one: a week has 1000.
                if after and after.number == one.number + 1 and after.after is None and after.began > one.began:
                    found.append((one, after.began))
                    continue
                self._read_fragments(one.path)
                if one.path in self._known:
                    found.append((one, self._known[one.path][1].ended))
            return found

    def write(self, since: float, until: float, path: Path) -> None:
        """Export the recording between two Unix times to one MP4, starting at a keyframe. Gaps are skipped.

        Raises:
            ArchiveError: if nothing was recorded, the video format changes, or the MP4 would exceed `MOST_BYTES`.
            OSError, FFmpegError: if reading or writing fails.
        """
        files = self.files(since, until)
        if not files:
            raise ArchiveError("nothing was recorded in the requested time range", missing=True)
        size = sum(part.size for one in files for part in one.fragments)
        if size > MOST_BYTES:
            raise ArchiveError(
                f"video of {size / 1e9:.1f} GB requested, limit {MOST_BYTES / 1e9:.1f} GB; request a shorter time range"
            )
        for one in files:
            if one.form != files[0].form:
                changed = datetime.fromtimestamp(one.began, UTC).isoformat(timespec="seconds")
                raise ArchiveError(
                    f"the video format changes at {changed}: request the video before and after this time separately"
                )
        with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as out:
            _copy(files, out)

    def playlist(self, since: float, until: float, url: Callable[[str], str], *, ended: bool) -> str:
        """Return an HLS playlist of the recording between two Unix times.

        Args:
            since: start, Unix time in seconds.
            until: end, Unix time in seconds.
            url: function that returns the URL of a file. Its argument is the file's path relative to `root`.
            ended: whether the playlist is final. If False, players load it again to get new segments.

        Raises:
            ArchiveError: if nothing was recorded, or no segment is complete yet.
        """
        files = self.files(since, until)
        if not files:
            raise ArchiveError("nothing was recorded in the requested time range", missing=True)
        segments = [list(parts_of(one)) for one in files]
        if not ended and files[-1].ended > until - _GROWS_S:
            segments[-1].pop()
        if not any(segments):
            raise ArchiveError("the recording has just begun; try again in a few seconds", missing=True)
        lines, longest = [], _SEGMENT_S
        for number, one in enumerate(files):
            if not segments[number]:
                continue
            address = url(str(one.path.relative_to(self.root)))
            lines += ["#EXT-X-DISCONTINUITY"] if number else []
            lines.append(f'#EXT-X-MAP:URI="{address}",BYTERANGE="{len(one.head)}@0"')
            for count, part in enumerate(segments[number]):
                longest = max(longest, part.duration)
                if not count:
                    shown = datetime.fromtimestamp(one.began + part.start, UTC).isoformat(timespec="milliseconds")
                    lines.append(f"#EXT-X-PROGRAM-DATE-TIME:{shown.replace('+00:00', 'Z')}")
                lines.append(f"#EXTINF:{part.duration:.5f},")
                lines.append(f"#EXT-X-BYTERANGE:{part.size}@{part.offset}")
                lines.append(address)
        head = ["#EXTM3U", "#EXT-X-VERSION:7", f"#EXT-X-TARGETDURATION:{round(longest + 0.5)}"]
        head += ["#EXT-X-PLAYLIST-TYPE:VOD" if ended else "#EXT-X-PLAYLIST-TYPE:EVENT"]
        return "\n".join([*head, *lines, *(["#EXT-X-ENDLIST"] if ended else []), ""])

    def _read_heads(self) -> None:
        """Update the index in memory: add new files of the recording, and remove deleted files."""
        known, self._known = self._known, {}
        for path in self._place.files():
            try:
                inode = path.stat().st_ino
                if path in known and known[path][0] == inode:
                    self._known[path] = known[path]
                    continue
                with path.open("rb") as file:
                    start = file.read(_HEAD_BYTES)
            except OSError:
                continue  # deleted meanwhile
            if (found := _head_in(path, start)) is not None:
                self._known[path] = inode, found

    def _read_fragments(self, path: Path) -> None:
        """Read the fragments that were appended to the file since its fragments were last read."""
        inode, one = self._known[path]
        last = one.fragments[-1] if one.fragments else None
        at = last.offset + last.size if last else len(one.head)
        fragments = list(one.fragments)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            del self._known[path]
            return
        try:
            size = os.fstat(descriptor).st_size
            while at + 8 <= size and (fragment := _fragment_at(descriptor, at, size)) is not None:
                fragments.append(fragment)
                at += fragment.size
        finally:
            os.close(descriptor)
        if len(fragments) > len(one.fragments):
            self._known[path] = inode, replace(one, fragments=tuple(fragments))


def _head_in(path: Path, start: bytes) -> RecordedFile | None:
    boxes = boxes_in(start)
    length = sum(8 + len(content) for _, content in itertools.takewhile(lambda one: one[0] != b"moof", boxes))
    kinds = {kind for kind, _ in boxes}
    try:
        note = note_in(start) if b"moov" in kinds else None
        if note is None:
            return None
        after, form = str(note["after"] or ""), str(note["form"])
        return RecordedFile(path, float(note["began"]), int(note["number"]), after or None, form, start[:length], ())
    except (ValueError, KeyError, TypeError):
        return None  # somebody else's


def _fragment_at(descriptor: int, at: int, size: int) -> Fragment | None:
    """Return the fragment at byte offset `at` of a file of `size` bytes; None if the fragment is incomplete."""
    head = os.pread(descriptor, 8, at)
    length = int.from_bytes(head[:4])
    if head[4:] != b"moof" or at + length + 8 > size:
        return None
    moof = os.pread(descriptor, length + 8, at)
    whole = length + int.from_bytes(moof[length : length + 4])
    timing = timing_of(moof[8:length])
    if moof[length + 4 :] != b"mdat" or at + whole > size or timing is None:
        return None
    return Fragment(at, whole, timing.start / VIDEO_SCALE, timing.duration / VIDEO_SCALE, timing.key)


def parts_of(file: RecordedFile) -> Iterator[Part]:
    """Split a recorded file into HLS segments of at least 3.5 s. The last segment can be shorter."""
    first: Fragment | None = None
    for before, one in itertools.pairwise((None, *file.fragments, None)):
        if first is not None and before is not None:
            seconds = before.start + before.duration - first.start
            if one is None or (one.key and seconds >= _SEGMENT_S - 0.5):
                yield Part(file, first.offset, before.offset + before.size - first.offset, first.start, seconds)
                first = None
        first = first or one


class _Parts:
    """A read-only file object with the header and the selected fragments of a recorded MP4."""

    def __init__(self, one: RecordedFile) -> None:
        self._file = one.path.open("rb")
        first, last = one.fragments[0], one.fragments[-1]
        self._head = one.head
        self._left = last.offset + last.size - first.offset
        self._file.seek(first.offset)

    def read(self, size: int) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()


def _copy(files: Sequence[RecordedFile], out: av.container.OutputContainer) -> None:
    muxer: Muxer | None = None
    streams: list[av.stream.Stream] = []
    total = Fraction(0)
    for one in files:
        parts = _Parts(one)
        try:
            with av.open(parts, "r", format="mp4") as read:
                if muxer is None:
                    streams = [out.add_stream_from_template(stream) for stream in read.streams]
                    muxer = Muxer(out)
                shift = total - Fraction(one.fragments[0].start)
                for packet in read.demux():
                    if not packet.size or packet.dts is None or packet.pts is None:
                        continue
                    moved = round(shift / packet.time_base)
                    packet.pts, packet.dts = packet.pts + moved, packet.dts + moved
                    muxer.mux(packet, streams[packet.stream_index])
        finally:
            parts.close()
        total += Fraction(sum(Fraction(part.duration) for part in one.fragments))
