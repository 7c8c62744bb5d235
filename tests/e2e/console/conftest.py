"""A console with a stream that goes on for ever, a store, a file that it may write, and a model that talks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.reload import ConfigReloader
from saccade.pipeline.runtime.stream import open_stream
from saccade.pipeline.session import Session, opened_session
from tests.support.cameras import free_port
from tests.support.engine import TINY, random_model, write_model

FILE = """\
# The shop.
http: '{port}'
store: '{folder}/kept'
detect: [person]
ask: '{folder}/tiny'
ask_deadline: 60s
streams:
  - name: hall # over the entrance
    source: rtsp://127.0.0.1:1/hall
    vid_stride: 2
    zones:
      desk: "0,0,1,0,1,1,0,1"
    rules:
      # who is there
      - name: visitor # anyone
        when: person in desk
"""


@dataclass(slots=True, frozen=True)
class Console:
    """Where it is served, and its file."""

    url: str
    path: Path
    session: Session


@pytest.fixture(scope="package")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder, port = tmp_path_factory.mktemp("console"), free_port()
    write_model(folder / "tiny", TINY, random_model(TINY))
    path = folder / "shop.yaml"
    path.write_text(FILE.format(port=port, folder=folder))
    settings = load(path, {})
    with opened_session(settings) as session:
        session._waiting.clear()  # the camera of the file is the demo clip, over and over
        session.config_api.actions = ConfigReloader(path, {}, settings, session)
        (hall,) = settings.each()
        clip = hall.model_copy(update={"source": str(DEMO_CLIP)})
        with (
            open_stream(
                clip,
                session.streams.engine,
                repeat=True,
                events=session.events,
                history=True,
                media=session._media,
                ask=session._ask,
            ) as stream,
            stream.reserve(session.streams) as name,
        ):
            stream.start(session.streams, name)
        yield Console(f"http://127.0.0.1:{port}/", path, session)
