"""Fixtures of the sinks' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sinks import disk


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[disk.FullDisk]:
    """An empty disk of 1 MB that can be filled."""
    with disk.full_disk(tmp_path / "disk") as made:
        yield made
