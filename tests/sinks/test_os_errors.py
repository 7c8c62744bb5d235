"""What is said where a folder belongs to another user, as Docker leaves one that it had to make."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.sinks.os_errors import write_failure
from tests.support import REPO

root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to run as another user")


def test_other_errors_are_named_alone() -> None:
    assert write_failure("out/a.mp4", OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"


def test_a_refusal_of_a_folder_that_can_be_written_is_named_alone(tmp_path: Path) -> None:
    assert write_failure(tmp_path / "a", PermissionError(errno.EACCES, "Permission denied")) == "Permission denied"


@root_only
@pytest.mark.parametrize(
    ("mode", "owner", "says"),
    [
        (0o755, 0, "belongs to uid 0 and this process runs as uid 4321; run `sudo chown -R 4321:4321`"),
        (0o500, 4321, "its folder is not writable; run `chmod u+wx"),
    ],
)
def test_the_command_that_mends_it_is_said(tmp_path: Path, mode: int, owner: int, says: str) -> None:
    out = Path(f"/tmp/saccade-owner-{os.getpid()}")
    out.mkdir()
    try:
        os.chown(out, owner, owner)
        out.chmod(mode)
        code = f"""
import os, sys
sys.path.insert(0, {str(REPO)!r})
from saccade.sinks.os_errors import write_failure
os.setgid(4321); os.setuid(4321)
try:
    open({str(out / "a.mp4")!r}, "w")
except OSError as error:
    print(write_failure({str(out / "a.mp4")!r}, error))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert says in done.stdout
    finally:
        out.rmdir()
