"""Where the files are that ship inside the package: the demo clip and the pages."""

from __future__ import annotations

from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"

DEMO_CLIP = _ASSETS / "demo.mp4"
"""200 frames of 640x360 pixels at 10 a second, with people in them."""

PAGES = _ASSETS / "demo"
"""The folder of the pages of `saccade demo` and of `whep:`, with their scripts and styles."""
