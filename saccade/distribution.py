"""Name and version of Saccade's Python distribution. The name `saccade` on PyPI belongs to another project."""

from __future__ import annotations

import os

DISTRIBUTION = "saccade-live"
VERSION = "0.2.0"


def install_command(extra: str) -> str:
    """Return a hint for error messages: how to install an optional dependency group (extra)."""
    if os.environ.get("SACCADE_IMAGE"):  # packages installed by pip would be lost with the container
        return f"this image is built without it; build one with --build-arg EXTRAS='… {extra}'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
