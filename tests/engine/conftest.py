"""A small model of every output and an open vocabulary, with random weights, and an engine over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.engine import Engine
from tests.support.engine import TINY, random_model, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return write_model(tmp_path_factory.mktemp("tiny"), TINY, random_model(TINY))


@pytest.fixture
def tiny(folder: Path) -> Iterator[Engine]:
    """An engine of two step slots, for one test; a module that wants another has a fixture of this name."""
    with Engine.load(str(folder), "cpu", depth=2) as engine:
        yield engine
