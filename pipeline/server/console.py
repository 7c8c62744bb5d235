"""The console: the page at `/`, what it needs to know of the model, and the video and frames of every stream.

    GET /                            the page, and its files beside it
    GET /model                       the model, the names that it knows, the prompts at first, and what can be done here
    GET /names?of=bike               what the model calls that: {"names": ["bicycle"], "colors": {…}}, or {"error": "…"}
    GET /streams/door/frame.jpg      its next frame, with what was found drawn on it; ?overlay=off without, ?width=640
    POST /whep/door                  its video, see `saccade.pipeline.server.whep.server`

Over the data channel of a video a page may change the prompts of its stream: {"detect": ["cat"]}. The answer is
{"prompts": {…}, "colors": {…}} or {"error": "…"}.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from saccade.engine.errors import EngineError
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import Prompts
from saccade.pipeline.config.file import explain, first_mistake
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.runtime.tasks import in_model_names
from saccade.pipeline.server.access import client_of
from saccade.pipeline.server.static_files import FILES, file_route, send_file
from saccade.pipeline.server.streams_api import changes_of, parse_json
from saccade.pipeline.server.whep.server import WhepServer, width_of
from saccade.sinks import color_of
from saccade.sinks.still import jpeg
from saccade.sinks.video.broadcast import BroadcastSink, NoSuchStreamError
from saccade.sources.http.auth import HttpAuth, refusal
from saccade.sources.webrtc.signaling import SILENCE_S

_LONGEST_NAME = 200
_FRAME_S = 5.0  # that a frame is waited for
_JPEG = 88  # quality


class Console:
    """The routes of the page, and of what a `Local` alone can answer, since it needs pixels or the engine.

    Attributes:
        whep: the video of every stream.
        public: paths that need no token: nothing secret; the page requests the rest with its token.

    Args:
        controller: of the streams that it shows.
        prompts: what a page's own video is searched for at first; None where pages may send none.
        token, silence_s, auth: as in `WhepServer`.
    """

    def __init__(
        self,
        controller: Controller,
        prompts: Prompts | None = None,
        *,
        token: str | None = None,
        silence_s: float = SILENCE_S,
        auth: HttpAuth | None = None,
    ) -> None:
        local = controller.local
        self._controller = controller
        self._events = local.store is not None
        self._talks = "query" in local.asks.model.skills
        self._engine = local.engine
        self._videos = videos = local.videos or BroadcastSink()
        self._prompts = prompts
        self.whep = WhepServer(
            videos, token=token, answer=self.answer, silence_s=silence_s, auth=auth, on_viewers=self._watch
        )
        self.public = [*FILES, "/clip.mp4"]

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        return [
            *(file_route(place, path) for place, path in FILES.items()),
            web.get("/clip.mp4", _clip),
            web.get("/model", self._model),
            web.get("/names", self._names),
            web.get("/streams/{name}/frame.jpg", self._frame),
            *self.whep.routes(),
        ]

    def answer(self, stream: str, text: str) -> str:
        """Change the prompts of a stream as a page asks, and return what they are now."""
        try:
            wanted = Prompts.model_validate(parse_json(text))
            if wanted.model_fields_set:
                self._controller.update(stream, changes_of(wanted))
            return json.dumps(_described(in_model_names(self._engine, self._controller.stream(stream))))
        except ValidationError as error:
            reason = explain(first_mistake(error), Prompts)
        except (ValueError, RecursionError):
            reason = "the message is not JSON"
        except (ConfigError, EngineError, StreamError) as error:
            reason = str(error)
        return json.dumps({"error": reason})

    def _watch(self, stream: str, viewers: int) -> None:
        """Give a stream that is watched more of the model."""
        with suppress(StreamError):  # it has ended
            self._controller.streams.get(stream).watch(watched=viewers > 0)

    async def _model(self, request: web.Request) -> web.Response:
        model = self._engine.model
        described = {
            "model": model.name.rpartition("/")[2] or model.name,
            "device": model.device,
            "classes": model.classes,
            "skills": model.skills,
            "publish": self._prompts is not None and client_of(request).may("operator"),
            "talks": self._talks,
            "events": self._events,
            "role": client_of(request).role,
            "saves": self._controller.file is not None and client_of(request).may("admin"),
        }
        asked = self._prompts or Prompts()
        colors = _colors([*(model.classes or []), *asked.detect, *asked.point, *asked.segment])
        return web.json_response({**described, "prompts": asked.model_dump(), "colors": colors})

    async def _names(self, request: web.Request) -> web.Response:
        try:
            names = self._engine.resolve([request.query.get("of", "")[:_LONGEST_NAME]])
        except EngineError as error:
            return web.json_response({"error": str(error)})  # an answer like any other
        return web.json_response({"names": names, "colors": _colors(names)})

    async def _frame(self, request: web.Request) -> web.Response:
        width = width_of(request)
        try:
            future = self._videos.next(request.match_info["name"])
        except NoSuchStreamError:
            raise refusal(web.HTTPNotFound, "there is no video of a stream of that name") from None
        try:
            shown = await asyncio.wait_for(asyncio.wrap_future(future), _FRAME_S)
        except TimeoutError:
            raise refusal(web.HTTPGatewayTimeout, f"no frame came within {_FRAME_S:g} s") from None
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            raise refusal(web.HTTPNotFound, "the stream has ended") from None
        drawn = request.query.get("overlay") != "off"
        data = await asyncio.to_thread(lambda: jpeg(shown.image(drawn=drawn, width=width), _JPEG))
        taken = {"X-Frame-Captured-At": f"{shown.frame.captured_at:.3f}", "Cache-Control": "no-store"}
        return web.Response(body=data, content_type="image/jpeg", headers=taken)


def _described(prompts: Prompts) -> dict[str, Any]:
    return {"prompts": prompts.model_dump(), "colors": _colors([*prompts.detect, *prompts.point, *prompts.segment])}


def _colors(labels: list[str]) -> dict[str, str]:
    """The colours of labels, as in frames that are drawn here."""
    return {label: "#{:02x}{:02x}{:02x}".format(*color_of(label)) for label in labels}


async def _clip(request: web.Request) -> web.StreamResponse:
    return await send_file(request, DEMO_CLIP, {})
