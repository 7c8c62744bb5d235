"""Sends the live video of a stream as endless fragmented MP4, for browsers without WebRTC and networks without UDP.

Each viewer receives these MP4 boxes:
    start      ftyp, uuid, moov; repeated when the size of the video changes
    prompts    emsg (the prompts and label colors of the stream, as JSON)
    frame      emsg (the record of the frame as JSON), moof, mdat

The query parameters are the same as for WHEP. Each frame is sent when the next frame is available, because MP4 needs
the duration of the frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import StreamingResponse

from saccade.pipeline.api.forward import WorkerRoute
from saccade.pipeline.api.generator_response import GeneratorResponse
from saccade.pipeline.api.routes import Routes
from saccade.pipeline.api.whep import Whep, WhepServer, width_of
from saccade.pipeline.api.whep_peer import next_frame
from saccade.sinks.record import to_json
from saccade.sinks.video.broadcast import NoSuchStreamError, View, ViewerFrame
from saccade.sinks.video.fragments import VIDEO, Sample, codecs_of, event_of, fragment_of, head_of, length_prefixed
from saccade.web.errors import HttpError

_FIRST_FRAME_S = 10.0

routes = Routes("video", WorkerRoute)


@routes.get("/streams/{name}/live.mp4", role="viewer", response_class=StreamingResponse)
async def watch_mp4(name: str, request: Request, whep: Whep) -> GeneratorResponse:
    """Send the live video of a stream as endless fragmented MP4.

    The `emsg` box before each frame contains the frame's record as JSON.
    """
    parts = _parts(name, View(request.query_params.get("overlay") != "off", "H264", width_of(request)), whep)
    return await GeneratorResponse.begin(parts, lambda head: f'video/mp4; codecs="{codecs_of(head)}"')


async def _parts(name: str, view: View, whep: WhepServer) -> AsyncGenerator[bytes]:
    """Yield the MP4 header, then each frame with its JSON record. Stop if the stream ends or the client disconnects."""
    if name not in whep.videos.streams:
        raise HttpError(404, "this stream does not exist")
    with ExitStack() as leave:
        leave.enter_context(whep.count_viewer(name))
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        try:
            viewer = whep.videos.join(name, view, wake)
        except NoSuchStreamError:
            raise HttpError(404, "the stream has ended") from None
        leave.callback(viewer.leave)
        try:
            frame = await asyncio.wait_for(next_frame(viewer, changed), _FIRST_FRAME_S)
        except TimeoutError:
            raise HttpError(503, "the stream has no frames now; try again later") from None
        if frame is None:
            raise HttpError(404, "the stream has ended")
        start, number, head = frame.encoded.pts, 0, _head(frame)
        yield head
        prompts = whep.prompts_of(name)
        if prompts is not None:
            yield event_of(0, 0, prompts.encode())
        while (following := await next_frame(viewer, changed)) is not None:
            number += 1
            yield _frame(number, frame, following.encoded.pts, start)
            frame = following
            if frame.encoded.key and (new := _head(frame)) != head:
                yield (head := new)


def _head(frame: ViewerFrame) -> bytes:
    return head_of("h264", frame.encoded.data, sound=None, note={})


def _frame(number: int, frame: ViewerFrame, until: int, start: int) -> bytes:
    """Return a frame as MP4: an `emsg` box with the JSON record of the frame, then a fragment with the video frame.

    Args:
        number: sequence number of the fragment.
        frame: the encoded frame.
        until: timestamp of the next frame, in units of 1/90000 s.
        start: timestamp of the first frame that was sent to the viewer, in units of 1/90000 s.
    """
    at, encoded = frame.encoded.pts - start, frame.encoded
    sample = Sample(length_prefixed(encoded.data), until - encoded.pts, key=encoded.key)
    record = to_json({**frame.record, "rtp_timestamp": at})
    return event_of(number, at, record) + fragment_of(number, [(VIDEO, at, [sample])])
