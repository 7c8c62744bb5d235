"""Fixtures of the messaging sinks' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sinks.broker import Broker, Listener
from tests.support.sinks.receiver import Receiver


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as one:
        yield one


@pytest.fixture
def listener(broker: Broker) -> Iterator[Listener]:
    with Listener(broker) as one:
        yield one


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()
