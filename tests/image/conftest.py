"""`make image-test`: the image with a real Docker, the chart with a real Helm. Skipped without them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import REPO

IMAGE = "saccade:image-test"


def run(command: Sequence[str | Path], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], cwd=REPO, capture_output=True, text=True, check=False)
    if check and done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Minutes of building are for `make image-test` alone."""
    if config.getoption("markexpr") == "image":
        return
    for item in items:
        if item.get_closest_marker("image"):
            item.add_marker(pytest.mark.skip(reason="builds an image or needs Helm: make image-test"))


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    """The image for a CPU, built from this tree."""
    if shutil.which("docker") is None or run(["docker", "info"], check=False).returncode:
        pytest.skip("needs Docker and its daemon")
    run(["docker", "build", "--network", "host", "-t", IMAGE, "."])
    yield IMAGE
    run(["docker", "rmi", "-f", IMAGE], check=False)


@pytest.fixture(scope="session")
def helm() -> str:
    found = shutil.which("helm")
    if found is None:
        pytest.skip("needs Helm")
    return found
