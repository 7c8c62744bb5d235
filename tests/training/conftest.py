"""A small pack of images and labels, and one thread for all of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import one_thread
from tests.support.training import small_pack
from training.data import Split, load_split


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def train(pack: Path) -> Split:
    return load_split(pack, "train", 2)
