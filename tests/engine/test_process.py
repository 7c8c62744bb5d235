"""What the engine changes for the whole process: spinning, collections, and their end with the last engine."""

from __future__ import annotations

import ctypes
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


ARENAS = """
import ctypes, os, re, tempfile, threading
{first}
barrier = threading.Barrier(24)
def work():
    kept = [bytearray(20_000) for _ in range(50)]
    barrier.wait(60)
threads = [threading.Thread(target=work) for _ in range(24)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
with tempfile.TemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
    libc.malloc_info(0, stream), libc.fclose(stream)
    file.seek(0)
    print(len(re.findall(rb"<heap nr=", file.read())), os.environ.get("MALLOC_ARENA_MAX"))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library than glibc")
@pytest.mark.parametrize(
    ("first", "environment", "most", "told"),
    [
        ("import saccade.engine", {}, 2, "2"),
        ("import saccade.engine", {"MALLOC_ARENA_MAX": "3"}, 3, "3"),
        ("import saccade.engine", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=5"}, 5, "None"),
        ("from saccade.engine.process import limit_arenas; limit_arenas(); limit_arenas()", {}, 2, "2"),
    ],
)
def test_threads_share_two_arenas(first: str, environment: dict[str, str], most: int, told: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = ARENAS.format(first=first)
    ran = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)
    assert ran.stdout.split() == [str(most), told], ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")
def test_threads_of_the_command_line_do_not_spin() -> None:
    code = "import os, sys; sys.argv = ['saccade', 'models']; from saccade.pipeline.cli.main import main\n"
    code += "try: main()\nfinally: import saccade.engine; print([os.environ.get(name) for name in "
    code += "('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'MALLOC_ARENA_MAX')])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MALLOC_"))}
    ran = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "['PASSIVE', None, '2']", ran.stderr


GAPS = """
import re, threading, time
from pathlib import Path
from saccade.engine import process
process.keep_freed_memory()
def rss():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
blocks, kept = [], []
for _ in range(2000):
    blocks.append(bytearray(100_000)), kept.append(bytearray(700))
full = rss()
blocks.clear()
freed = rss()
process._TRIM_S = 0.05
process.engine_opened()
deadline = time.monotonic() + 60
while rss() > full - 150 and time.monotonic() < deadline:
    time.sleep(0.05)
threads = [one.name for one in threading.enumerate()]
left = rss()
process.engine_opened(), process.engine_closed()
assert threads == [one.name for one in threading.enumerate()]
process.engine_closed()
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.05)
print(full - freed < 50, full - left >= 150, threads, threading.active_count())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_freed_memory_is_given_back_while_an_engine_is_open() -> None:
    ran = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True)
    assert ran.stdout.strip() == "True True ['MainThread', 'saccade-memory'] 1", ran.stderr
