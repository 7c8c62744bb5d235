"""Which package and module may import which.

Imports are read from the syntax tree: also those inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support import REPO, tracked

PACKAGES = ("engine", "pipeline", "sinks", "sources", "web")

MAY_IMPORT = {
    "web": set(),
    "sources": {"web"},
    "engine": set(),
    "sinks": {
        "sources.frame",
        "sources.demux",
        "sources.video_stream",
        "sources.live.packets",
        "web",
        "engine.results",
    },
    "pipeline": {"engine", "sinks", "sources", "web"},
}
"""What of the other packages a package may import."""

ORDER = {
    "web": "errors tls tokens | auth body | guard server",
    "sources": "errors planes timestamps rtp | demux frame | "
    "base gpu image_file rgb urls video_stream | network | file replay live | images rtsp webrtc onvif | factory",
    "sinks": "os_errors overlay record backoff file_lock | base | urls outbox callback | retention | "
    "guard display jsonl messaging still video websocket | recording | factory",
    "engine": "outline | errors image process results | kernels | config models | "
    "tasks | core | cpu | cuda | runtime | model_loader | api | golden",
    "pipeline": "asset_files errors settings | analytics | events | config | runtime | search | control | api | "
    "worker | run | bench | cli",
}
"""The modules and sub-packages of a package from the lowest to the highest: each imports only what stands before a bar
to its left. The package's own `__init__` stands above all of them."""


def name_of(path: Path) -> str:
    """The module's name within `saccade`, such as `sources.rtsp.client`; of an `__init__`, that of its package."""
    parts = path.relative_to(REPO).with_suffix("").parts
    parts = parts[parts[0] == "saccade" :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    folders = [REPO / "saccade" / package if package == "web" else REPO / package for package in PACKAGES]
    return {name_of(path): path for folder in folders for path in sorted(folder.rglob("*.py"))}


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(name: str) -> frozenset[str]:
    """The project's modules that a module imports, by their names within `saccade`."""
    found = set()
    for imported in imported_names(tree_of(modules()[name])):
        target = imported.removeprefix("saccade.")
        while target != imported and target and target not in modules():
            target = target.rpartition(".")[0]  # a name of a module, or a module of a package
        if target and target not in (imported, name):
            found.add(target)
    return frozenset(found)


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    forbidden = {(name, target) for name in modules() for target in imports_of(name) if not within(target, allowed)}
    assert {(name, target) for name, target in forbidden if within(name, {package})} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_inside_a_package_imports_run_one_way(package: str) -> None:
    layers = [layer.split() for layer in ORDER[package].split("|")]
    height = {f"{package}.{unit}": number for number, layer in enumerate(layers) for unit in layer}
    height[package] = len(layers)

    def unit(name: str) -> str:
        return ".".join(name.split(".")[:2])

    inside = [name for name in modules() if within(name, {package})]
    assert {unit(name) for name in inside} == height.keys(), "ORDER lists every module and sub-package"
    upward = {
        (name, target)
        for name in inside
        for target in imports_of(name)
        if within(target, {package}) and unit(target) != unit(name) and height[unit(target)] >= height[unit(name)]
    }
    assert upward == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({name: imports_of(name) for name in modules()}).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_kernels_import_nothing_else_of_the_engine() -> None:
    kernels = {"engine.kernels"}
    inside = [name for name in modules() if within(name, kernels)]
    assert {(name, target) for name in inside for target in imports_of(name) if not within(target, kernels)} == set()


def test_architectures_are_known_to_models_and_devices_only() -> None:
    """What everything else needs of a model is in `models.protocol`, so that another architecture changes nothing."""
    may = {"engine.models", "engine.cpu", "engine.cuda"}
    others = [name for name in modules() if not within(name, may)]
    known = {"engine.models.moondream", "engine.models.nano"}
    assert {(name, target) for name in others for target in imports_of(name) if within(target, known)} == set()


def test_every_module_is_imported_as_part_of_saccade() -> None:
    """Under its bare name it would be loaded twice, with two copies of each class."""
    name = "|".join(PACKAGES)
    bare = re.compile(
        rf"(^|[\s;'\"`(])(from ({name})[. ][\w. ]*import\b|(?<!from saccade )import ({name})\b)|-m ({name})\b"
    )
    lines = [
        f"{path.relative_to(REPO)}: {line.strip()}"
        for path in tracked(".py", ".md", ".yaml", ".toml", ".sh", "")
        for line in path.read_text(encoding="utf-8").splitlines()
        if bare.search(line)
    ]
    assert lines == []


def test_imports_are_absolute() -> None:
    relative = re.compile(r"\bfrom[\s\\]*\.")  # also matches some texts; to parse every file takes 5 s
    suspects = [path for path in tracked(".py") if relative.search(path.read_text(encoding="utf-8"))]
    found = [path for path in suspects if any(name[0] == "." for name in imported_names(tree_of(path)))]
    assert found == []


def test_sources_and_sinks_do_without_torch() -> None:
    code = "import sys, saccade.sources, saccade.sinks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_engines_state_machines_do_without_torch() -> None:
    """So they are tested in milliseconds, and nothing in them waits for a device."""
    parts = ("core", "core.admission", "core.request", "core.scheduler", "core.speculative", "tasks")
    code = f"import sys, {', '.join(f'saccade.engine.{part}' for part in parts)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_modules_and_packages_begin_with_a_docstring() -> None:
    folders = {folder for path in modules().values() for folder in [path.parent]}
    assert {str(folder) for folder in folders if not (folder / "__init__.py").exists()} == set()
    silent = [name for name, path in modules().items() if not ast.get_docstring(tree_of(path))]
    assert silent == []
