"""The MCP tools for AI assistants: the streams of a running Saccade, their frames, and questions about the frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from saccade.pipeline.cli.api_client import ApiClient, ApiError, data_url, summary_of

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_INSTRUCTIONS = (
    "Live cameras and videos, and a model that detects objects in them. list_streams lists the streams; look shows "
    "the newest frame of a stream; detect and ask examine it. Boxes are fractions of the frame's width and height."
)

_POLL_S = 1.0
_OF_EVENTS = ("id", "rule", "stream", "label", "zones", "start_time", "end_time", "top_score", "answers", "clip")

Stream = Annotated[str, Field(description="name of a stream, as returned by list_streams")]
T = TypeVar("T")


def make_server(api: ApiClient, version: str) -> MCPServer[Any]:
    """Return an MCP server with tools that call the HTTP API. `api` must stay open while the server runs."""
    server: MCPServer[Any] = MCPServer("saccade", instructions=_INSTRUCTIONS, version=version, log_level="WARNING")

    @server.tool(annotations=_READS)
    async def list_streams() -> list[dict[str, Any]]:
        """List the video streams with their name, health, prompts and number of detections."""
        return [summary_of(stream) for stream in await _plain(api.streams())]

    @server.tool(annotations=_READS)
    async def look(
        stream: Stream,
        boxes: Annotated[bool, Field(description="draw the detections on the frame")] = True,
    ) -> Image:
        """Show the newest frame of a stream."""
        return Image(data=await _plain(api.frame(stream, drawn=boxes)), format="jpeg")

    @server.tool(annotations=_READS)
    async def detect(
        stream: Stream,
        objects: Annotated[
            list[str], Field(description="labels to detect, such as ['person', 'car']", min_length=1, max_length=16)
        ],
    ) -> list[dict[str, Any]]:
        """Detect objects in the newest frame of a stream. Returns labels, scores and boxes."""
        image = data_url(await _plain(api.frame(stream, drawn=False)))
        return [box for name in objects for box in await _plain(api.detect(image, name))]

    @server.tool(annotations=_READS)
    async def ask(stream: Stream, question: Annotated[str, Field(min_length=1, max_length=4096)]) -> str:
        """Ask a question about the newest frame of a stream. This needs a model that answers questions."""
        return await _plain(api.ask(data_url(await _plain(api.frame(stream, drawn=False))), question))

    @server.tool(annotations=_READS)
    async def events(
        stream: Annotated[str, Field(description="return only events of this stream")] = "",
        rule: Annotated[str, Field(description="return only events of this rule")] = "",
        since: Annotated[
            str, Field(description="start time: a duration before now such as 15m, 2h or 1d, or a Unix time in seconds")
        ] = "",
        words: Annotated[str, Field(description="words to search for in labels, rules and answers")] = "",
        limit: Annotated[int, Field(ge=1, le=200)] = 20,
    ) -> list[dict[str, Any]]:
        """List the events of rules, newest first."""
        found = await _plain(api.events(stream=stream, rule=rule, since=since, q=words, limit=str(limit)))
        return [{key: event.get(key) for key in _OF_EVENTS} for event in found]

    @server.tool(annotations=_READS)
    async def watch(
        stream: Annotated[str, Field(description="return only events of this stream")] = "",
        rule: Annotated[str, Field(description="return only events of this rule")] = "",
        seconds: Annotated[float, Field(gt=0, le=300, description="maximum time to wait, in seconds")] = 60.0,
    ) -> dict[str, Any] | None:
        """Wait until a rule begins an event, and return the event. After a timeout, return null."""
        known = {event["id"] for event in await _plain(api.events(stream=stream, rule=rule, limit="50"))}
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(_POLL_S, left))
            found = await _plain(api.events(stream=stream, rule=rule, limit="10"))
            if new := [event for event in found if event["id"] not in known]:
                return {key: new[-1].get(key) for key in _OF_EVENTS}
        return None

    @server.tool(annotations=_READS, structured_output=False)
    async def clip(event: Annotated[str, Field(description="the id of an event")]) -> list[Any]:
        """Show the snapshot of an event, and the download URL of its video clip."""
        return [Image(data=await _plain(api.snapshot(event)), format="jpeg"), f"Clip: {api.clip_url(event)}"]

    return server


async def _plain(work: Awaitable[T]) -> T:
    """Return the result of an API request.

    Raises:
        ToolError: if the request fails.
    """
    try:
        return await work
    except ApiError as error:
        raise ToolError(str(error)) from None
