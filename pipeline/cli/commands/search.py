"""`saccade search`: stored events that show something, the likeliest first."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from saccade.pipeline.core.build import load_engine
from saccade.pipeline.core.config import RunConfig
from saccade.pipeline.core.errors import ConfigError
from saccade.pipeline.events.store_reader import EventQuery, EventReader, StoreError
from saccade.pipeline.search import Found, search_events


@dataclass(slots=True, frozen=True)
class Search:
    """What was found in a folder."""

    found: list[Found]
    media: Path

    def as_json(self) -> str:
        """As JSON, `match` from 0 to 1."""
        return json.dumps({"events": [one.to_json() for one in self.found]}, indent=2, ensure_ascii=False)

    def as_text(self) -> str:
        """As a table, with the snapshot of each."""
        lines = []
        for one in self.found:
            event = one.event
            began = event["start_time"]
            live = event["capture_clock"] != "file"
            when = f"{datetime.fromtimestamp(began):%Y-%m-%d %H:%M:%S}" if live else f"{began:.1f} s"
            snapshot = self.media / f"{event['id']}.jpg"
            lines.append(f"{one.p_yes:4.2f}  {when}  {event['stream']}  {event['rule']}  {event['label']}  {snapshot}")
        return "\n".join(lines) or "no event was found"


def search(
    folder: Path, text: str, query: EventQuery, settings: RunConfig, progress: Callable[[int, int], None]
) -> Search:
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
        return Search(search_events(store, engine, text, query, progress=progress), store.media_folder)
