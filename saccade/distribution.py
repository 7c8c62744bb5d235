"""The name and version of the distribution. The import name `saccade` belongs to another project on PyPI."""

from __future__ import annotations

import os

DISTRIBUTION = "saccade-live"
VERSION = "0.2.0"


def install_command(extra: str) -> str:
    """What makes an optional part available, for messages: a command of pip, or how to build our image with it.

    A container's file system may be read-only, and what pip installs there is gone with it.
    """
    if os.environ.get("SACCADE_IMAGE"):
        return f"this image is built without it; build one with --build-arg EXTRAS='… {extra}'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
