"""Saccades: the model also processes small windows of a large frame in native resolution, to detect small objects.

One processed window is called a look. A small object that is outside the windows of a frame is predicted.

    memory   stores small objects: the expected position and the time of the last detection of each
    sweep    makes sure that each part of the frame is looked at regularly
    planner  chooses the windows of a frame from motion, memory and sweep
    auto     chooses the number of windows per frame of a live stream
    stage    the saccade stage of one stream: adds windows to frames, and merges their results

Only `stage` handles frames and the model. All other modules handle numbers.
"""

from saccade.pipeline.analytics.saccades.planner import Look, Planner, Reason

__all__ = ["Look", "Planner", "Reason"]
