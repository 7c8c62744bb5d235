"""Routes for recorded video: time spans with video, export as MP4, and HLS playlists.

Times in requests are Unix times in seconds, or durations before now, such as 2h.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import av.error
from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import Response, StreamingResponse

from saccade.pipeline.api.file_response import OpenFileResponse
from saccade.pipeline.api.forward import Here, InThisProcess, WorkerRoute
from saccade.pipeline.api.routes import Routes, the
from saccade.pipeline.events.storage.store_reader import time_of_text
from saccade.sinks.recording import Archive, ArchiveError, Span
from saccade.sinks.recording.archive import Part, parts_of
from saccade.web.errors import HttpError

routes = Routes("recording", WorkerRoute)

_LONGEST_S = 31 * 86400.0
_CHUNK = 1 << 20
_HLS = "application/vnd.apple.mpegurl"


@dataclass(slots=True)
class Exports:
    """A lock that limits MP4 exports to one at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)  # an export can read and write several gigabytes


class PlayablePart(BaseModel):
    """A byte range of a recorded MP4 file that a player can play.

    The player must first load the MP4 header: the first `head` bytes of the file.
    """

    file: str
    codecs: str
    head: int
    offset: int
    size: int
    begin: float
    start: float
    duration: float


class Recording(BaseModel):
    """The time spans with recorded video, within the requested time range.

    The query parameter `?parts=1` adds the byte ranges that a player needs.
    """

    recorded: bool = True
    spans: list[Span]
    parts: list[PlayablePart] | None = None


class Between(BaseModel):
    """The time range in a request for recorded video."""

    since: str = Field(
        "1d",
        alias="from",
        description="start of the time range: a Unix time in seconds, or a duration before now such as 2h",
    )
    until: str = Field(
        "0s",
        alias="to",
        description="end of the time range: a Unix time in seconds, or a duration before now such as 2h",
    )
    parts: bool = False
    token: str | None = Field(None, description="bearer token, as an alternative to the Authorization header")


Asked = Annotated[Between, Query()]


@routes.get("/streams/{name}/recording/spans", role="viewer", response_model_exclude_none=True)
async def spans(name: str, asked: Asked, here: InThisProcess) -> Recording:
    """Return the time spans with recorded video of a stream, and the reason for the gap before each span."""
    since, until = _times(asked)
    if (archive := here.local.archive(here.running(name))) is None:
        return Recording(recorded=False, spans=[])
    found = await asyncio.to_thread(archive.spans, since, until)
    if not asked.parts:
        return Recording(spans=found)
    files = await asyncio.to_thread(archive.files, since, until)
    parts = [_playable(archive, part) for one in files for part in parts_of(one)]
    return Recording(spans=found, parts=parts)


@routes.get("/streams/{name}/recording/index.m3u8", role="viewer", response_class=Response)
async def playlist(name: str, asked: Asked, here: InThisProcess) -> Response:
    """Return an HLS playlist for a time range of a stream's recording.

    The segments of the playlist are byte ranges of the recorded files.
    """
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
    """Return a recorded video file. Range requests are supported."""
    try:
        opened = await asyncio.to_thread(_archive(here, name).open_file, file)
    except ArchiveError as error:
        raise HttpError(404, str(error)) from None
    return OpenFileResponse(opened, "video/mp4", "private, no-cache")


@routes.get("/streams/{name}/recording", role="viewer", response_class=Response)
async def download(name: str, asked: Asked, here: InThisProcess, exports: Annotated[Exports, the(Exports)]) -> Response:
    """Export a time range of a stream's recording as one MP4 file. Gaps in the recording are skipped.

    The video starts at the last keyframe before the requested start, because it is not re-encoded.
    """
    archive, since, until = _archive(here, name), *_times(asked)
    if not exports.lock.acquire(blocking=False):
        raise HttpError(503, "another export is running; try again")
    try:
        descriptor, size = await asyncio.to_thread(_export, archive, since, until, exports)
    except ArchiveError as error:
        raise HttpError(404 if error.missing else 409, str(error)) from None
    except (OSError, av.error.FFmpegError) as error:
        raise HttpError(503, f"the export cannot be written: {error.strerror}") from None
    named = f'attachment; filename="{quote(name)}-{int(since)}.mp4"'
    headers = {"Content-Length": str(size), "Content-Disposition": named, "Cache-Control": "no-store"}
    return StreamingResponse(_chunks(descriptor), media_type="video/mp4", headers=headers)


def _archive(here: Here, name: str) -> Archive:
    if (archive := here.local.archive(here.running(name))) is None:
        raise HttpError(404, f"'{name[:80]}' is not recorded: set `record` for this stream")
    return archive


def _times(asked: Between) -> tuple[float, float]:
    try:
        since, until = time_of_text(asked.since), time_of_text(asked.until)
    except ValueError:
        raise HttpError(
            422, "from and to should be Unix times in seconds, or durations before now such as 2h"
        ) from None
    if not 0 < until - since <= _LONGEST_S:
        raise HttpError(422, "from should be earlier than to, by at most 31 days")
    return since, until


def _export(archive: Archive, since: float, until: float, exports: Exports) -> tuple[int, int]:
    """Export a recording to a temporary MP4 file, then release the export lock.

    Return a file descriptor and the file size in bytes. Closing the file descriptor deletes the file.
    """
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
