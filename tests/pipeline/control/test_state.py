"""The desired state on disk: what was saved is there, also after kill -9, for one process and for its owner alone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from saccade.pipeline.config.file import load
from saccade.pipeline.control.state import StateFile
from saccade.pipeline.errors import ConfigError
from tests.support import REPO

CONFIG = load(
    None,
    {
        "detect": "person",
        "conf": 0.3,
        "streams": [
            {"source": "rtsp://me:secret@c/a", "zones": {"z": {"polygon": ".1,.1,.9,.1,.9,.9", "loitering": "5s"}}},
            {"source": "a.mp4", "name": "b", "rules": [{"name": "r", "when": "person in z for 2s", "cooldown": "1m"}],
             "zones": {"z": ".1,.1,.9,.1,.9,.9"}, "began": "2026-01-01 21:50", "max_fps": 2},
        ],
    },
).resolved()  # fmt: skip


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "inner" / "a.state"
    with closing(StateFile(path)) as state:
        assert state.load(CONFIG) is None
        assert not path.exists()
        state.save(CONFIG, CONFIG.with_streams(CONFIG.streams[1:]))
        with pytest.raises(ConfigError, match="another process is using this state file"):
            StateFile(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with closing(StateFile(path)) as state:
        loaded = state.load(CONFIG)
        assert loaded is not None
        base, desired = loaded
        assert base.named() == CONFIG.named()
        assert list(desired.named()) == ["b"]
        state.save(base, base.with_streams([]))
    with closing(StateFile(path)) as state:
        loaded = state.load(CONFIG)
        assert loaded is not None
        assert loaded[1].streams == []


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to look at" * 90])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.state"
    path.write_bytes(content)
    if not content:  # as of a process that was killed while it made it
        with closing(StateFile(path)) as state:
            assert state.load(CONFIG) is None
        return
    with pytest.raises(ConfigError, match=r"a\.state: cannot store changes in this file: file is not a database"):
        StateFile(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        closing(StateFile(tmp_path / "file" / "a.state")) as state,
        pytest.raises(ConfigError, match="cannot store changes in this file"),
    ):
        state.save(CONFIG, CONFIG)


def test_a_saved_state_outlives_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from saccade.pipeline.config.file import load; from saccade.pipeline.control.state import StateFile\n"
        "state = StateFile(Path(sys.argv[1]))\n"
        "for number in range(1, 1000):\n"
        "    config = load(None, {'source': 'a.mp4', 'detect': 'person', 'max_objects': number}).resolved()\n"
        "    state.save(config, config); print(number, flush=True)\n"
    )
    path = tmp_path / "a.state"
    command = [sys.executable, "-c", code, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    for round_ in range(5):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(round_ * 3 + 1):
                said = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        last = int(rest[-1]) if rest else said
        with closing(StateFile(path)) as state:
            loaded = state.load(CONFIG)
            assert loaded is not None
            assert loaded[1].streams[0].max_objects in (last, last + 1)
