"""The name and version of the distribution. The import name `saccade` belongs to another project on PyPI."""

from __future__ import annotations

DISTRIBUTION = "saccade-live"
VERSION = "0.1.0"


def install_command(extra: str) -> str:
    """The command that installs an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
