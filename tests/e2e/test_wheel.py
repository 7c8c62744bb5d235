"""The wheel, installed in an environment of its own and used from a folder that knows nothing of the checkout.

What the wheel needs is borrowed from the environment of the tests, so that nothing is downloaded; the project itself is
not: `.pth` files, by which an editable install is found, are read in an environment's own folder only.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import REPO, listed
from tests.support.command import LONG_S, environment
from tests.support.documents import blocks_of

pytestmark = pytest.mark.e2e


@dataclass(slots=True, frozen=True)
class Installed:
    """The wheel's file, the programs of the environment that it is installed in, and its folder there."""

    wheel: Path
    programs: Path
    package: Path

    def run(self, program: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [str(self.programs / program), *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=bare(), capture_output=True, text=True, timeout=LONG_S, check=False)


def bare() -> dict[str, str]:
    """An environment variables' set that leads nowhere near the checkout."""
    return {name: value for name, value in environment().items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    for path in listed():
        copy = folder / "checkout" / path.relative_to(REPO)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "checkout"]
    subprocess.run([*pip, *build], check=True, env=bare(), timeout=LONG_S)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(folder / "checkout")

    place = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=LONG_S)
    python = place / "bin" / "python"
    install = ["--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([*pip, *install], check=True, env=bare(), timeout=LONG_S)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return Installed(wheel, python.parent, packages / "saccade")


def test_its_only_top_level_name_is_saccade(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    (metadata,) = {name.partition("/")[0] for name in names} - {"saccade"}
    assert metadata.endswith(".dist-info")
    shipped = {Path(name) for name in names}
    assets = {path.relative_to(REPO) for path in listed() if path.is_relative_to(REPO / "pipeline" / "assets")}
    configs = {path.relative_to(REPO) for path in listed() if path.is_relative_to(REPO / "configs")}
    weights = Path("engine/models/nano/model.safetensors")
    assert {Path("saccade") / path for path in {*assets, *configs, weights, Path("py.typed")}} <= shipped
    assert [name for name in names if "test" in Path(name).parts] == []


def test_the_command_runs_on_the_clip_that_ships(installed: Installed, tmp_path: Path) -> None:
    clip = installed.package / "pipeline" / "assets" / "demo.mp4"
    wanted = ["--detect", "person", "--start", 10, "--end", 10.5, "--jsonl", "found.jsonl", "--out", "found.mp4"]
    done = installed.run("saccade", "run", clip, *wanted, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    records = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(records) == 5
    assert {found["label"] for record in records for found in record["objects"]} == {"person"}


def test_the_demo_answers_and_stops(installed: Installed, tmp_path: Path) -> None:
    command = [installed.programs / "saccade", "demo", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, cwd=tmp_path, env=bare(), stdout=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(LONG_S, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[2]
            for path in ("", "demo.js", "clip.mp4"):
                with urllib.request.urlopen(url + path, timeout=LONG_S) as answer:
                    assert answer.status == 200
                    assert len(answer.read()) > 1000
            process.send_signal(signal.SIGINT)
            assert process.wait(LONG_S) == 0
        finally:
            killer.cancel()
            process.kill()


def test_the_documented_python_runs(installed: Installed, tmp_path: Path) -> None:
    shutil.copyfile(REPO / "pipeline" / "assets" / "demo.jpg", tmp_path / "frame.jpg")
    blocks = [block.text for block in blocks_of(REPO / "README.md") if block.language == "python"]
    where = "import saccade.engine.api\nprint(saccade.engine.api.__file__)\n"
    (tmp_path / "example.py").write_text("".join([*blocks, where]))
    done = installed.run("python", "example.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *found, file = done.stdout.splitlines()
    assert found
    assert Path(file).is_relative_to(installed.package)
