"""Starts Python commands by forking a process that has already imported torch, PyAV and Saccade.

A start of `python -m saccade run` takes 2 s of CPU for its imports; a fork takes milliseconds. The forked process is a
child of the caller, like that of `subprocess.Popen`: its pipes, signals, exit code and resource usage are its own.
"""

from __future__ import annotations

import atexit
import codecs
import ctypes
import gc
import importlib
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST = 1 << 17
_READ_EARLY = re.compile(
    r"PYTHON(?!IOENCODING)|LC_|LANG|LD_|OMP_|GOMP_|MKL_|OPENBLAS_|MALLOC_|GLIBC_|CUDA_|TORCH_|PYTORCH_|OPENCV_|TZ$"
)
"""Variables that Python, or a library that the server imports, reads when it starts."""
_OPTIONS = {"stdin", "stdout", "stderr", "env", "cwd", "start_new_session", "text", "encoding", "bufsize"}
_IMPORTED = (
    "saccade.pipeline.cli.main",
    "saccade.pipeline.cli.live_view",
    "saccade.pipeline.cli.signals",
    "saccade.pipeline.cli.trace_file",
    "saccade.pipeline.run",
    "saccade.pipeline.api.routes",
    "saccade.pipeline.api.http_server",
    "saccade.engine.models.moondream.loader",
    "saccade.engine.runtime.cpu_executor",
    "saccade.engine.runtime.refine",
    "av.subtitles.stream",
    "cv2",
    "torch",
)


class ForkServer:
    """A process that forks one process per request. It ends with the process that started it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End the server. Processes that it has forked go on."""
        self._channel.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Fork a process with the given standard streams and return its process id. It becomes a child of this one."""
        adopt = ctypes.CDLL(None, use_errno=True).prctl
        with self._lock:
            # The server forks a process that forks the wanted one and ends, which leaves the latter to this process.
            adopt(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], files)
                pid = int(self._channel.recv(32))
                self._channel.recv(32)  # the process between has ended
            finally:
                adopt(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid


@cache
def fork_server() -> ForkServer:
    """The server of this process; started when it is first needed."""
    from tests.support.command import environment

    return ForkServer(environment())


class ForkedProcess(subprocess.Popen[str]):
    """A process that the fork server starts. It takes the arguments of `Popen` for `[python, "-m", module, …]`."""

    @staticmethod
    def can_start(options: dict[str, Any]) -> bool:
        """Whether a fork does the same as a new interpreter with these options of `Popen`."""
        if not options.keys() <= _OPTIONS:
            return False
        ours, theirs = fork_server().environment, options["env"]
        early = filter(_READ_EARLY.match, ours.keys() | theirs.keys())
        return all(ours.get(name) == theirs.get(name) for name in early)

    def _execute_child(  # what Popen calls to fork and exec
        self,
        args: list[str],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: tuple[int, ...],
        cwd: str | os.PathLike[str] | None,
        env: dict[str, str],
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: None,
        gids: None,
        uid: None,
        umask: int,
        start_new_session: bool,
        process_group: int,
    ) -> None:
        _python, _m, module, *arguments = args
        request = {
            "module": module,
            "arguments": arguments,
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": env,
            "new_session": start_new_session,
        }
        given = [theirs if theirs != -1 else own for own, theirs in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = fork_server().fork(request, given)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Returns only in the forked processes, with the request and their files."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, _MAX_REQUEST, 3)
        if not message:
            sys.exit()
        between = os.fork()
        if not between:
            parent = os.getpid()
            wanted = os.fork()
            if not wanted:
                while os.getppid() == parent:  # until the caller has become the parent
                    time.sleep(0.001)
                return json.loads(message), files
            channel.send(str(wanted).encode())
            os._exit(0)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        channel.send(b"forked")


def _reopen(name: str, number: int) -> None:
    """Make a standard stream anew, with the encoding and buffering that Python would choose for it."""
    old: io.TextIOWrapper = getattr(sys, name)
    buffering = 0 if old.write_through else -1  # as PYTHONUNBUFFERED says
    binary: Any = open(number, "wb" if number else "rb", buffering, closefd=False)  # noqa: SIM115
    getattr(binary, "raw", binary).name = f"<{name}>"
    encoding, errors = old.encoding, old.errors
    if asked := os.environ.get("PYTHONIOENCODING"):
        encoding, errors = codecs.lookup(asked).name, "strict" if number < 2 else "backslashreplace"
    new = io.TextIOWrapper(
        binary,
        encoding=encoding,
        errors=errors,
        line_buffering=number == 2 or binary.isatty(),
        write_through=old.write_through,
    )
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def main() -> None:
    """Import what commands need, then serve requests; in a forked process, run the module that is asked for."""
    before = dict(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends this process
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does before it loads torch
    for name in _IMPORTED:
        importlib.import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # a collection would copy every page
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        request, files = _serve(channel)
    if request["new_session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**set_by_imports, **request["environment"]})
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _reopen(name, number)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0] = os.getcwd()
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
