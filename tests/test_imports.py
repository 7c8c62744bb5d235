"""Reading and writing video must not load the engine's machinery. Who may know whom is held in test_house."""

from __future__ import annotations

import subprocess
import sys

from tests.support import REPO


def test_sources_and_sinks_do_without_torch() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sources, sinks; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code, str(REPO)], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
