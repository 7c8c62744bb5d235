"""Name and version of the distribution. On PyPI, the name `saccade` belongs to another project."""

from __future__ import annotations

import os

DISTRIBUTION = "saccade-live"
VERSION = "0.2.0"


def install_command(extra: str) -> str:
    """Return the command that installs an optional extra, for error messages: pip, or a build of the Docker image.

    In a container, the file system may be read-only, and packages installed by pip are lost with the container.
    """
    if os.environ.get("SACCADE_IMAGE"):
        return f"this image is built without it; build one with --build-arg EXTRAS='… {extra}'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
