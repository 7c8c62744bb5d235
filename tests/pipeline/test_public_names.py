"""What `saccade.pipeline` and its packages export, and that it is cheap to import."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from tests.support import REPO

PACKAGES = ["saccade.pipeline", "saccade.pipeline.api"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_there(package: str) -> None:
    module = import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


def test_streams_and_outputs_load_without_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from saccade.pipeline import Output, Streams; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(REPO)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
