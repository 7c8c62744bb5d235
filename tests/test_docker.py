"""No Docker here: what can be held of its files without it."""

from __future__ import annotations

import re
import subprocess
import sys

import yaml

from tests.support import REPO

DOCKERFILE = (REPO / "Dockerfile").read_text()


def stages() -> dict[str, str]:
    """Each stage, and what it is made from."""
    return dict(reversed(found) for found in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE))


def test_every_stage_is_made_from_an_earlier_one() -> None:
    known: set[str] = set()
    for name, origin in stages().items():
        assert origin in known or origin == "python:${PYTHON}-slim"
        known.add(name)
    assert list(stages())[-1] == "cpu"
    assert set(re.findall(r"COPY --from=(\S+)", DOCKERFILE)) <= known


def test_what_is_copied_is_all_that_the_package_is_made_of() -> None:
    kept = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    packages = {path.split("/")[0] for path in tracked if path.endswith("__init__.py") and not path.startswith("tests")}
    assert kept == packages | {"configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE"}


def test_compose_runs_what_ships_and_checks_its_health() -> None:
    services = yaml.safe_load((REPO / "compose.yaml").read_text())["services"]
    for service in services.values():
        config = REPO / service["command"][-1].removeprefix("/")
        assert config.exists()
        assert yaml.safe_load(config.read_text())["http"] == "127.0.0.1:8080"
        _, interpreter, flag, script = service["healthcheck"]["test"]
        assert (interpreter, flag) == ("python", "-c")
        compile(script, "healthcheck", "exec")
    target = services["cuda"]["build"]["target"]
    assert target in stages()


def test_the_health_check_fails_where_nothing_listens() -> None:
    services = yaml.safe_load((REPO / "compose.yaml").read_text())["services"]
    script = services["saccade"]["healthcheck"]["test"][-1].replace("8080", "1")
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode != 0
