"""`saccade search`: stored events that show something, the likeliest first; in a folder, or of a running saccade."""

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

_ANSWER_S = 180.0  # between two answers of a slow model


@dataclass(slots=True, frozen=True)
class Search:
    """What was found, and where the snapshot of an event is, by its id."""

    searched: Searched
    snapshot: Callable[[str], str]

    def as_json(self) -> str:
        """As JSON, `match` from 0 to 1."""
        return json_text(self.searched.to_json())

    def as_text(self) -> str:
        """As a table, with the snapshot of each."""
        lines = []
        for one in self.searched.found:
            event = one.event
            began = event["start_time"]
            live = event["capture_clock"] != "file"
            when = f"{datetime.fromtimestamp(began):%Y-%m-%d %H:%M:%S}" if live else f"{began:.1f} s"
            about = f"{when}  {event['stream']}  {event['rule']}  {event['label']}"
            lines.append(f"{one.p_yes:4.2f}  {about}  {self.snapshot(event['id'])}")
        if self.searched.away:
            lines.append(f"not asked, since they do not answer: {', '.join(self.searched.away)}")
        return "\n".join(lines) or "no event with a snapshot was found"


def search(folder: Path, text: str, query: EventQuery, settings: RunConfig, progress: Progress) -> Search:
    """Search a store.

    Raises:
        ConfigError: if there is no store, or nothing to search for that the model knows.
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
    """Have a running saccade search its stores, by its own model.

    Raises:
        ConfigError: if none answers there, or it refuses.
    """
    if not _is_address(url):
        raise ConfigError("--url: should be the address of a running saccade, such as http://127.0.0.1:8080")
    url = url.rstrip("/")
    asked = urlencode({**filters_of(query), "q": text})
    headers = {"Accept": "text/event-stream", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        request = urllib.request.Request(f"{url}/events/search?{asked}", headers=headers)
        look_up(urlsplit(url).hostname or "")  # urlopen cannot give up on a resolver
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
        raise ConfigError(f"--url: {url} does not answer: {one_line(str(error))}") from None
    raise ConfigError(f"--url: {url} has ended the search")


def _is_address(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https")
    except ValueError:  # http://[::1
        return False


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return "it keeps no events: start it with --store DIR, and give it rules"
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
