from __future__ import annotations

import os
from pathlib import Path

from saccade.pipeline.workers.memory import available_bytes, room_for, rss_bytes


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 4000 << 10
    for name, text in (("memory.max", "max"), ("memory.current", "3000000"), ("memory.stat", "inactive_file 500000\n")):
        (tmp_path / name).write_text(text)
    assert available_bytes(meminfo, tmp_path) == 4000 << 10
    (tmp_path / "memory.max").write_text("5000000")
    assert available_bytes(meminfo, tmp_path) == 2_500_000


def test_a_process_is_begun_where_there_is_room() -> None:
    assert room_for(1 << 20, 1 << 20) is None
    assert room_for(1 << 40, None) is None
    assert room_for(300 << 20, 100 << 20) == "100 MB of memory are free, and one more worker takes about 300 MB"
    assert rss_bytes(os.getpid()) > 1 << 20
    assert rss_bytes(2**22 + 1) == 0
