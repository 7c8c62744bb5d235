"""The command `saccade search`: finds stored events that match a text, in a local store or in a running Saccade."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from saccade.lookups import run
from saccade.pipeline.api.events_query import filters_of
from saccade.pipeline.cli.api_client import ApiClient, ApiError
from saccade.pipeline.cli.terminal import json_text
from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.storage.store_reader import EventQuery, EventReader, StoreError
from saccade.pipeline.runtime.stream import load_engine
from saccade.pipeline.search import Found, Progress, Searched, search_events


@dataclass(slots=True, frozen=True)
class Search:
    """The results of a search for events.

    Attributes:
        searched: the events that match the text.
        snapshot: function that converts an event ID to the path or URL of the event's snapshot.
    """

    searched: Searched
    snapshot: Callable[[str], str]

    def as_json(self) -> str:
        """Return the found events as JSON.

        `match` is the probability that the snapshot matches the text, from 0 to 1.
        """
        return json_text(self.searched.to_json())

    def as_text(self) -> str:
        """Return the found events as a table with the path or URL of each snapshot."""
        lines = []
        for one in self.searched.found:
            event = one.event
            began = event["start_time"]
            live = event["capture_clock"] != "file"
            when = f"{datetime.fromtimestamp(began):%Y-%m-%d %H:%M:%S}" if live else f"{began:.1f} s"
            about = f"{when}  {event['stream']}  {event['rule']}  {event['label']}"
            lines.append(f"{one.p_yes:4.2f}  {about}  {self.snapshot(event['id'])}")
        if self.searched.away:
            lines.append(f"not searched, because they do not respond: {', '.join(self.searched.away)}")
        return "\n".join(lines) or "no events with a snapshot found"


def search(folder: Path, text: str, query: EventQuery, settings: RunConfig, progress: Progress) -> Search:
    """Search the events in a local event store for a text. The model compares the text with the events' snapshots.

    Raises:
        ConfigError: if the store does not exist, or the model cannot search for the text.
        EngineError: if the model cannot be used.
    """
    try:
        store = EventReader.open(folder)
    except StoreError as error:
        raise ConfigError(f"--store: {error}") from None
    with closing(store), load_engine(settings) as engine:
        found = search_events(store, engine, text, query, progress=progress)
        return Search(Searched(found), lambda event: str(store.media_path(event, "snapshot")))


def search_at(url: str, token: str | None, text: str, query: EventQuery, progress: Progress) -> Search:
    """Search the stored events of a running Saccade for a text, over its HTTP API.

    Raises:
        ConfigError: if no server responds at the URL, or the server rejects the request.
    """

    async def ask() -> dict[str, Any]:
        async with ApiClient(url, token) as client:
            return await client.search({**filters_of(query), "q": text}, progress)

    try:
        answer = run(ask())
    except (ApiError, ValueError) as error:
        raise ConfigError(f"--url: {error}") from None
    found = [Found(event, event.pop("match")) for event in answer["events"]]
    snapshots = f"{url.rstrip('/')}/events"
    return Search(Searched(found, answer.get("away", [])), lambda event: f"{snapshots}/{event}/snapshot.jpg")
