"""What tests share: models, cameras, brokers, browsers, peers. `REPO` is the checkout under test."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def listed() -> Iterator[Path]:
    """Every file of the checkout that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for line in subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines():
        if (REPO / line).exists():
            yield REPO / line


def tracked(*suffixes: str) -> Iterator[Path]:
    """Those of them with one of the suffixes, without links."""
    return (path for path in listed() if path.suffix in suffixes and path.is_file() and not path.is_symlink())
