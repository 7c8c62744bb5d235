"""The site is built as `make docs` builds it: a broken link or a missing page fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from saccade.pipeline.config import RunConfig
from tests.support import REPO


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "reference/configuration/index.html").read_text()
    assert [key for key in RunConfig.model_fields if f'id="{key}"' not in settings] == []
    assert "saccade bench frame" in (tmp_path / "reference/commands/index.html").read_text()
    python = (tmp_path / "reference/python/index.html").read_text()
    assert "saccade.engine.api.Engine.detect" in python
