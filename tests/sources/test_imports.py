"""The order in which the modules of `saccade.sources` may import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import saccade.sources

FOLDER = Path(saccade.sources.__file__).parent
ORDER = [
    ["errors", "planes"],
    ["frame"],
    ["urls"],
    ["gpu", "image_file", "rgb", "timestamps", "video_stream"],
    ["base"],
    ["file"],
    ["images", "replay"],
    ["rtp", "http"],
    ["live"],
    ["rtsp", "webrtc", "onvif"],
    ["factory"],
    ["__init__"],
]
RANK = {name: number for number, names in enumerate(ORDER) for name in names}
LEAVES = ("rtp", "http", "errors", "planes", "timestamps")


def imported(path: Path) -> set[str]:
    """What a file imports of the project, as in "sources.rtp.packet"."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("saccade."):
            names.add(node.module.removeprefix("saccade."))
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("saccade.") for alias in node.names if alias.name.startswith("saccade.")}
    return names


def unit(name: str) -> str:
    return name.removeprefix("sources").strip(".").partition(".")[0] or "__init__"


def test_modules_import_only_those_below_them() -> None:
    wrong = []
    for path in FOLDER.rglob("*.py"):
        own = path.relative_to(FOLDER).parts[0].removesuffix(".py")
        for name in imported(path):
            other = unit(name)
            if name == "distribution":
                continue
            if not name.startswith("sources") or (other != own and (RANK[other] >= RANK[own] or own in LEAVES)):
                wrong.append(f"{path.relative_to(FOLDER)} imports {name}")
    assert wrong == []


def test_no_module_imports_itself_in_a_circle() -> None:
    modules = {"sources." + ".".join(p.relative_to(FOLDER).with_suffix("").parts): p for p in FOLDER.rglob("*.py")}
    needs = {name: imported(path) & modules.keys() for name, path in modules.items()}
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    assert needs == {}


def test_opening_a_file_loads_neither_aiortc_nor_aiohttp() -> None:
    code = "import sys, saccade.sources; print(sorted({'aiortc', 'aiohttp'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_no_file_is_longer_than_400_lines() -> None:
    assert [p.name for p in FOLDER.rglob("*.py") if len(p.read_text().splitlines()) > 400] == []
