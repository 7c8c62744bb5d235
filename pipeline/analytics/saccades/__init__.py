"""Saccades: the model also processes small regions of a large frame at full resolution, to detect small objects.

Such a region is called a zoom window, or a look in records. Between two windows, the position of a small object is
predicted.

    memory   stores small objects, and predicts their positions
    sweep    schedules zoom windows that cover the whole frame
    planner  chooses the zoom windows of each frame from motion, memory and sweep
    auto     chooses the number of zoom windows per frame of a live stream
    stage    the saccade stage of one stream: chooses zoom windows, and adds predicted boxes to results

Only `stage` accesses frames and results. The other modules compute with boxes and times.
"""

from saccade.pipeline.analytics.saccades.planner import Look, Planner, Reason

__all__ = ["Look", "Planner", "Reason"]
