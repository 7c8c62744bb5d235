"""Saccades: the model also processes small regions of a large frame at full resolution, to detect small objects.

Such a region is a zoom window. Between two zoom windows, the position of a small object is predicted.

`memory` stores small objects and predicts their positions. `sweep` schedules zoom windows that cover the whole frame.
`planner` chooses the zoom windows of each frame. `auto` chooses the number of zoom windows per frame of a live stream.
`stage` applies these modules to one stream, and adds predicted boxes to the results.
"""

from saccade.pipeline.analytics.saccades.planner import Look, Planner, Reason

__all__ = ["Look", "Planner", "Reason"]
