"""An engine for all tests of the server, and streams on it for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from saccade.engine import Engine
from saccade.pipeline import Streams


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


@pytest.fixture
def streams(engine: Engine) -> Iterator[Streams]:
    with Streams(engine) as those:
        yield those
