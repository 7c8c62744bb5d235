"""Draws analysis results onto images: boxes, points, answers, zones, lines and trails of tracks."""

from saccade.sinks.overlay.draw import draw
from saccade.sinks.overlay.drawings import register_drawing
from saccade.sinks.overlay.scene import Line, Trail, Zone
from saccade.sinks.overlay.style import PALETTE, color_of

__all__ = ["PALETTE", "Line", "Trail", "Zone", "color_of", "draw", "register_drawing"]
