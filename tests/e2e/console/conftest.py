"""A console with a stream that goes on for ever, a store, a file that it may write, and a model that talks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.run import OpenedRun, opened_run
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
    source: '{clip}'
    loop: true
    vid_stride: 4
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
    opened: OpenedRun


@pytest.fixture(scope="package")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder, port = tmp_path_factory.mktemp("console"), free_port()
    write_model(folder / "tiny", TINY, random_model(TINY))
    path = folder / "shop.yaml"
    path.write_text(FILE.format(port=port, folder=folder, clip=DEMO_CLIP))
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        yield Console(f"http://127.0.0.1:{port}/", path, opened)
