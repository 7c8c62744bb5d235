"""Paths of files that the package contains: the demo clip and the web pages."""

from __future__ import annotations

from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"

DEMO_CLIP = _ASSETS / "demo.mp4"
"""The demo clip: 200 frames of 640x360 pixels at 10 frames per second, with people."""

PAGES = _ASSETS / "demo"
"""The folder with the pages, scripts and styles of `saccade demo` and `whep:`."""
