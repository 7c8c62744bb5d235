"""Saccades: the model also processes small windows of a large frame at full resolution, to detect small objects.

The processing of one window is called a look. If no window contains a known small object, its position is predicted.

    memory   stores small objects: the expected position and the time of the last detection of each object
    sweep    schedules windows so that each part of the frame is processed regularly
    planner  chooses the windows of a frame from motion, memory and sweep
    auto     chooses the number of windows per frame of a live stream
    stage    the saccade stage of one stream: adds windows to frames, and merges their results

Only `stage` accesses frames and the model. The other modules compute with boxes and times.
"""

from saccade.pipeline.analytics.saccades.planner import Look, Planner, Reason

__all__ = ["Look", "Planner", "Reason"]
