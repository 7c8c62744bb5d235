"""Saccades: where in a large frame the model looks again, at native resolution, and what is known between two looks.

    memory   small objects: where each is expected, and when it was last found
    sweep    when each part of the frame was last looked at, and where objects appear
    planner  chooses the windows of a frame from motion, memory and sweep
    auto     how many windows a live stream can afford
    stage    the saccades of one stream: frames in, windows out; results in, one list of boxes out

All but `stage` are plain numbers: no frames, no model.
"""

from saccade.pipeline.analytics.saccades.planner import Look, Planner, Reason

__all__ = ["Look", "Planner", "Reason"]
