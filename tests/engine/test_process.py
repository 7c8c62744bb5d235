"""What the engine changes for the whole process: spinning, collections, and their end with the last engine."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.engine import Engine
from saccade.engine.process import shorten_collections


@pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")
@pytest.mark.parametrize(
    ("imports", "environment", "wanted"),
    [
        ("saccade.engine", {}, "True 20000"),
        ("torch, saccade.engine", {}, "False None"),
        ("saccade.engine", {"OMP_NUM_THREADS": "2"}, "False None"),
        ("saccade.engine", {"GOMP_SPINCOUNT": "7"}, "False 7"),
    ],
)
def test_spinning_is_limited_before_torch_is_loaded(imports: str, environment: dict[str, str], wanted: str) -> None:
    code = f"import os, {imports}; from saccade.engine.process import limit_spinning; "
    code += "print(limit_spinning(), os.environ.get('GOMP_SPINCOUNT'))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    ran = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)
    assert ran.stdout.split("\n")[0] == wanted, ran.stderr


def test_what_is_loaded_is_not_collected_again() -> None:
    shorten_collections()
    frozen = gc.get_freeze_count()
    later: list[object] = []
    later.append(later)
    shorten_collections()
    assert 10_000 < gc.get_freeze_count() <= frozen  # what is freed meanwhile counts no more
    assert any(one is later for one in gc.get_objects())
    shorten_collections(model=True)
    assert gc.get_freeze_count() > frozen
    assert not any(one is later for one in gc.get_objects())
    gc.unfreeze()


def test_a_model_is_collected_again_once_the_last_engine_is_closed(folder: Path) -> None:
    with Engine.load(str(folder), "cpu"):
        with Engine.load(str(folder), "cpu"):
            shorten_collections(model=True)
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
