"""What was recorded of a stream, over HTTP: which times, one MP4, or HLS to look through.

Times of a request are Unix times in seconds, or how long ago, such as 2h.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import av.error
from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import FileResponse, Response, StreamingResponse

from saccade.pipeline.api.forward import Here, WorkerRoute
from saccade.pipeline.api.routes import Routes, the
from saccade.pipeline.errors import StreamError
from saccade.pipeline.events.storage.store_reader import time_of_text
from saccade.sinks.recording import Archive, ArchiveError
from saccade.sinks.recording.archive import Part, parts_of
from saccade.web.errors import HttpError

routes = Routes("recording", WorkerRoute)

_LONGEST_S = 31 * 86400.0
_CHUNK = 1 << 20
_HLS = "application/vnd.apple.mpegurl"


@dataclass(slots=True)
class Exports:
    """The part of an application that writes MP4s: one at a time, since each reads and writes up to some GB."""

    lock: threading.Lock = field(default_factory=threading.Lock)


class Span(BaseModel):
    """A time that was recorded without a gap, as Unix times in seconds, and why something is missing before it."""

    begin: float
    end: float
    after: str | None


class PlayablePart(BaseModel):
    """Bytes of a file that play alone behind the file's head: `media` at `offset`, of `size`."""

    file: str
    codecs: str
    head: int
    offset: int
    size: int
    begin: float
    start: float
    duration: float


class Recording(BaseModel):
    """What there is between two times; with `?parts=1` also where it is, for a player."""

    recorded: bool = True
    spans: list[Span]
    parts: list[PlayablePart] | None = None


class Between(BaseModel):
    """What of the recording is asked for."""

    since: str = Field("1d", alias="from", description="a time in seconds, or how long ago, such as 2h")
    until: str = Field("0s", alias="to", description="likewise")
    parts: bool = False
    token: str | None = Field(None, description="instead of the Authorization header")


Asked = Annotated[Between, Query()]
InThisProcess = Annotated[Here, the(Here)]


@routes.get("/streams/{name}/recording/spans", role="viewer", response_model_exclude_none=True)
async def spans(name: str, asked: Asked, here: InThisProcess) -> Recording:
    """The times that were recorded; what is missing between two spans was not, and the later one says why."""
    since, until = _times(asked)
    if (archive := _archive_or_none(here, name)) is None:
        return Recording(recorded=False, spans=[])
    found = await asyncio.to_thread(archive.spans, since, until)
    listed = [Span.model_validate(asdict(span)) for span in found]
    if not asked.parts:
        return Recording(spans=listed)
    files = await asyncio.to_thread(archive.files, since, until)
    parts = [_playable(archive, part) for one in files for part in parts_of(one)]
    return Recording(spans=listed, parts=parts)


@routes.get("/streams/{name}/recording/index.m3u8", role="viewer", response_class=Response)
async def playlist(name: str, asked: Asked, here: InThisProcess) -> Response:
    """An HLS playlist of what was recorded between two times, whose segments are ranges of the files."""
    archive, since, until = _archive(here, name), *_times(asked)
    token = f"?{urlencode({'token': asked.token})}" if asked.token else ""
    try:
        text = await asyncio.to_thread(
            archive.playlist, since, until, lambda file: f"files/{quote(file)}{token}", ended=until < time.time() - 10
        )
    except ArchiveError as error:
        raise HttpError(404 if error.missing else 409, str(error)) from None
    return Response(text, media_type=_HLS, headers={"Cache-Control": "no-store"})


@routes.get("/streams/{name}/recording/files/{file:path}", role="viewer", response_class=Response)
async def recorded_file(name: str, file: str, here: InThisProcess) -> Response:
    """A file of the recording, with ranges."""
    try:
        path = await asyncio.to_thread(_archive(here, name).file, file)
    except ArchiveError as error:
        raise HttpError(404, str(error)) from None
    return FileResponse(path, media_type="video/mp4", headers={"Cache-Control": "private, no-cache"})


@routes.get("/streams/{name}/recording", role="viewer", response_class=Response)
async def download(name: str, asked: Asked, here: InThisProcess, exports: Annotated[Exports, the(Exports)]) -> Response:
    """What was recorded between two times as one MP4, copied, from the key frame before; gaps are left out."""
    archive, since, until = _archive(here, name), *_times(asked)
    if not exports.lock.acquire(blocking=False):
        raise HttpError(503, "another part of a recording is being written; try again")
    try:
        descriptor, size = await asyncio.to_thread(_export, archive, since, until, exports)
    except ArchiveError as error:
        raise HttpError(404 if error.missing else 409, str(error)) from None
    except (OSError, av.error.FFmpegError) as error:
        raise HttpError(503, f"it cannot be written: {error.strerror}") from None
    named = f'attachment; filename="{quote(name)}-{int(since)}.mp4"'
    headers = {"Content-Length": str(size), "Content-Disposition": named, "Cache-Control": "no-store"}
    return StreamingResponse(_chunks(descriptor), media_type="video/mp4", headers=headers)


def _archive_or_none(here: Here, name: str) -> Archive | None:
    try:
        return here.local.archive(name)
    except StreamError as error:
        raise HttpError(404, str(error)) from None


def _archive(here: Here, name: str) -> Archive:
    if (archive := _archive_or_none(here, name)) is None:
        raise HttpError(404, f"'{name[:80]}' is not recorded: give it a `record`")
    return archive


def _times(asked: Between) -> tuple[float, float]:
    try:
        since, until = time_of_text(asked.since), time_of_text(asked.until)
    except ValueError:
        raise HttpError(422, "from and to should be times in seconds, or how long ago, such as 2h") from None
    if not 0 < until - since <= _LONGEST_S:
        raise HttpError(422, "from should be before to, by 31 days at most")
    return since, until


def _export(archive: Archive, since: float, until: float, exports: Exports) -> tuple[int, int]:
    """An open file with an MP4, which has no name any more, and its size; lets go of the lock."""
    try:
        handle, text = tempfile.mkstemp(prefix=".export-", suffix=".mp4", dir=archive.root)
        os.close(handle)
        path = Path(text)
        try:
            archive.write(since, until, path)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            path.unlink()
    finally:
        exports.lock.release()
    return descriptor, os.fstat(descriptor).st_size


def _chunks(descriptor: int) -> Iterator[bytes]:
    with os.fdopen(descriptor, "rb") as file:
        while data := file.read(_CHUNK):
            yield data


def _playable(archive: Archive, part: Part) -> PlayablePart:
    one = part.file
    return PlayablePart(
        file=quote(str(one.path.relative_to(archive.root))),
        codecs=one.codecs,
        head=len(one.head),
        offset=part.offset,
        size=part.size,
        begin=one.began + part.start,
        start=part.start,
        duration=part.duration,
    )
