"""Name and version of Saccade's Python distribution. The name `saccade` on PyPI belongs to another project."""

from __future__ import annotations

import os

DISTRIBUTION = "saccade-live"
VERSION = "0.2.0"


def install_command(extra: str) -> str:
    """Return the command that installs an optional dependency group (extra), for error messages.

    Outside a container, it is a pip command. In a container, it is a build of the Docker image, because packages
    installed by pip would be lost with the container.
    """
    if os.environ.get("SACCADE_IMAGE"):
        return f"this image is built without it; build one with --build-arg EXTRAS='… {extra}'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
