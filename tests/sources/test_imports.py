"""What an import of `saccade.sources` loads. Which module may import which is in tests/test_architecture.py."""

from __future__ import annotations

import subprocess
import sys


def test_opening_a_file_loads_neither_aiortc_nor_starlette() -> None:
    code = "import sys, saccade.sources; print(sorted({'aiortc', 'starlette'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
