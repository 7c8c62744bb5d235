"""A Ray cluster of one machine for a test: on loopback, in a folder of its own, and ended with all of its processes.

`ray stop` would end every cluster of the machine. What belongs to this one is known by its token in the environment.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support.cameras.rtsp import free_port
from tests.support.command import environment

HOST = "127.0.0.2"  # loopback, too; 127.0.0.1 Ray replaces by the machine's address
OTHER = "127.0.0.3"
_END_S = 20.0


class RayCluster:
    """Started on entry. `address` and `environment` are for commands that use it.

    Args:
        cpus: how many processors it says it has.
        variables: of its environment, besides this one's.
    """

    def __init__(self, cpus: int = 2, **variables: str) -> None:
        if sys.platform != "linux":
            pytest.skip("the cluster's processes are found in /proc")
        self._token = secrets.token_hex(16)
        self.address = f"{HOST}:{free_port()}"
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        quiet["RAY_worker_niceness"] = "0"
        self.environment = {**environment(), **quiet, **variables}
        self._cpus = cpus
        self._folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)  # short: for its sockets

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--num-cpus={self._cpus}"]
        command += [f"--node-ip-address={HOST}", f"--port={self.address.rpartition(':')[2]}"]
        command += ["--include-dashboard=false", "--include-log-monitor=false"]
        command += [f"--temp-dir={self._folder.name}", "--object-store-memory=80000000"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            self.close()
            pytest.fail(f"no Ray cluster: {done.stdout[-500:]} {done.stderr[-500:]}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_node(self, cpus: int) -> None:
        """Another machine of it, at an address of its own."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={self.address}"]
        command += [f"--node-ip-address={OTHER}", f"--num-cpus={cpus}", "--object-store-memory=80000000"]
        command += ["--include-log-monitor=false"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"no second node: {done.stdout[-500:]} {done.stderr[-500:]}"

    def processes(self, word: str = "") -> dict[int, str]:
        """Its processes, those of commands included, by id: their command lines that have a word in them."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if self._token.encode() not in (folder / "environ").read_bytes():
                    continue
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if word in line:
                    found[int(folder.name)] = line
        return found

    def close(self) -> None:
        """End every process of it."""
        deadline = time.monotonic() + _END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._folder.cleanup()
