"""`saccade search`: finds stored events that match a text, in a folder or through a running Saccade."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from saccade.lookups import look_up
from saccade.pipeline.api.events_query import filters_of
from saccade.pipeline.cli.terminal import json_text
from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import ConfigError, one_line
from saccade.pipeline.events.storage.store_reader import EventQuery, EventReader, StoreError
from saccade.pipeline.runtime.stream import load_engine
from saccade.pipeline.search import Found, Progress, Searched, search_events

_ANSWER_S = 180.0  # longest wait between two answers of a slow model


@dataclass(slots=True, frozen=True)
class Search:
    """The results of a search, and a function that returns the snapshot of an event by its ID."""

    searched: Searched
    snapshot: Callable[[str], str]

    def as_json(self) -> str:
        """Return the results as JSON; `match` is from 0 to 1."""
        return json_text(self.searched.to_json())

    def as_text(self) -> str:
        """Return the results as a table with their snapshots."""
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
    """Search an event store.

    Raises:
        ConfigError: if there is no store, or the model does not know the text.
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
    """Search the stores of a running Saccade with its own model.

    Raises:
        ConfigError: if no server responds at the address, or the server refuses the request.
    """
    if not _is_address(url):
        raise ConfigError("--url: should be the address of a running Saccade, such as http://127.0.0.1:8080")
    url = url.rstrip("/")
    asked = urlencode({**filters_of(query), "q": text})
    headers = {"Accept": "text/event-stream", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        request = urllib.request.Request(f"{url}/events/search?{asked}", headers=headers)
        look_up(urlsplit(url).hostname or "")  # urlopen has no timeout for name resolution
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                message = json.loads(line.removeprefix(b"data: "))
                if "error" in message:
                    raise ConfigError(f"--url: {message['error']['message']}")
                if "events" in message:
                    found = [Found(event, event.pop("match")) for event in message["events"]]
                    searched = Searched(found, message.get("away", []))
                    return Search(searched, lambda event: f"{url}/events/{event}/snapshot.jpg")
                progress(message["done"], message["of"])
    except urllib.error.HTTPError as error:
        raise ConfigError(f"--url: {_reason(error)}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"--url: {url} does not respond: {one_line(str(error))}") from None
    raise ConfigError(f"--url: {url} closed the connection during the search; try again")


def _is_address(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https")
    except ValueError:  # http://[::1
        return False


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return "this Saccade stores no events: start it with --store DIR and rules"
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
