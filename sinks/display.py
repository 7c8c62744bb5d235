"""Sink that shows each frame with its overlay in a window on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar, Self

import cv2
import numpy as np

from saccade.engine.results import Result
from saccade.sinks.base import SinkClosedError, SinkError, SourceHints
from saccade.sinks.overlay import draw
from saccade.sinks.record import Latency, drawn_latency
from saccade.sources.frame import Frame

_PROBE = "import cv2; cv2.namedWindow('saccade'); cv2.waitKey(1)"
_PROBE_TIMEOUT_S = 20
_QUIT_KEYS = (ord("q"), 27)  # 27 is Esc


class DisplaySink:
    """Shows frames in a window. The run ends when the user presses q or Esc, or closes the window.

    Args:
        title: title of the window.

    Raises:
        SinkError: if no window can be opened.
    """

    shared: ClassVar[bool] = False

    def __init__(self, title: str = "saccade") -> None:
        self._title = title
        self._shown = False
        if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise SinkError("no display found (neither DISPLAY nor WAYLAND_DISPLAY is set); write to a file instead")
        # The window toolkit ends the whole process when the screen refuses it, so a child process tries first.
        try:
            probe = subprocess.run(
                [sys.executable, "-c", _PROBE], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise SinkError("the display does not respond; write to a file instead") from None
        if probe.returncode != 0:
            raise SinkError("cannot open a window on the display; write to a file instead")

    @classmethod
    def open(cls, target: str, hints: SourceHints) -> Self:
        """Open a window for the target `display`. Raises SinkError like the constructor."""
        return cls()

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Show one frame with its overlay in the window.

        Raises:
            SinkClosedError: if the user closed the window or pressed q or Esc.
        """
        image = draw(frame.image, result, drawn_latency(frame, latency))
        if frame.pixel_aspect != 1:
            image = np.asarray(cv2.resize(image, frame.shown_size), dtype=np.uint8)
        if not self._shown:
            cv2.namedWindow(self._title, cv2.WINDOW_NORMAL)
            cv2.resizeWindow(self._title, frame.width, frame.height)
        cv2.imshow(self._title, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
        key = cv2.waitKey(1)
        self._shown = True
        if key & 0xFF in _QUIT_KEYS or cv2.getWindowProperty(self._title, cv2.WND_PROP_VISIBLE) < 1:
            raise SinkClosedError("the video window was closed")

    def close(self) -> None:
        """Close the window. A second call does nothing."""
        if self._shown:
            self._shown = False
            cv2.destroyAllWindows()
            cv2.waitKey(1)
