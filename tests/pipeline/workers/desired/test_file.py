from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.pipeline.errors import ConfigError
from saccade.pipeline.workers.desired.file import StateFile
from saccade.pipeline.workers.desired.state import DesiredState
from tests.support import REPO

WRITER = """
import sys
from pathlib import Path
from saccade.pipeline.workers.desired.file import StateFile
file = StateFile(Path(sys.argv[1]))
state = file.state
while True:
    state = state.with_stream("a", {"conf": state.revision}).with_stream("b", {"conf": state.revision})
    file.save(state)
    print(state.revision, flush=True)
"""


def test_a_state_comes_back_in_its_order(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state" / "desired.db")
    state = DesiredState().with_stream("b", {"conf": 0.4}).with_stream("a", {}).with_setting("token", "secret")
    file.save(state)
    state = state.with_stream("b", {"conf": 0.5}).with_stream("c", {}).without_stream("a")
    file.save(state)
    file.close()
    again = StateFile(tmp_path / "state" / "desired.db")
    assert again.state == state
    assert list(again.state.streams) == ["b", "c"]
    again.close()
    again.close()


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "desired.db"
    path.parent.mkdir()
    path.touch(mode=0o644)
    file = StateFile(path)
    file.save(DesiredState().with_setting("token", "secret"))
    modes = {stat.S_IMODE(os.stat(path.parent / name).st_mode) for name in os.listdir(path.parent)}
    assert modes == {0o600}
    file.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "desired.db")
    with pytest.raises(ConfigError, match="another process uses this state"):
        StateFile(tmp_path / "desired.db")
    file.close()
    StateFile(tmp_path / "desired.db").close()


@pytest.mark.parametrize("content", [b"no database at all, but some text that is long enough to be read" * 20])
def test_a_file_that_is_no_state_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "desired.db").write_bytes(content)
    with pytest.raises(ConfigError, match="the state cannot be kept there"):
        StateFile(tmp_path / "desired.db")
    assert (tmp_path / "desired.db").read_bytes() == content


def test_a_killed_writer_leaves_the_last_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "desired.db"
    seen = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, cwd=REPO, env={**os.environ}, text=True
        )
        assert process.stdout is not None
        for _ in range(20):
            seen = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        file = StateFile(path)
        state = file.state
        assert state.revision >= int(rest[-1] if rest and rest[-1].isdecimal() else seen)
        assert state.revision % 2 == 0  # both streams, or neither
        assert state.streams["a"]["conf"] == state.streams["b"]["conf"] == state.revision - 2
        file.close()
