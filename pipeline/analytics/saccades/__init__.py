"""Saccades: the model looks again at parts of a large frame in native resolution; small objects persist between looks.

    memory   small objects: the expected position and the time of the last detection
    sweep    when each part of the frame was last looked at, and where objects appear
    planner  chooses the windows of a frame from motion, memory and sweep
    auto     how many windows a live stream can afford
    stage    the saccades of one stream: frames in, windows out; results in, one list of boxes out

All modules except `stage` handle only numbers: no frames and no model.
"""

from saccade.pipeline.analytics.saccades.planner import Look, Planner, Reason

__all__ = ["Look", "Planner", "Reason"]
