"""What can be asked of an image: detect, point, gaze, segment, query, caption, and the table of all tasks.

A new task subclasses `Task` in a file of its own and is made known with `register_task`.
"""

from saccade.engine.tasks.objects import Detect, Gaze, ObjectsTask, Point
from saccade.engine.tasks.segment import Segment
from saccade.engine.tasks.task import TASKS, register_task
from saccade.engine.tasks.text import Caption, CaptionLength, Query, TextTask

__all__ = [
    "TASKS",
    "Caption",
    "CaptionLength",
    "Detect",
    "Gaze",
    "ObjectsTask",
    "Point",
    "Query",
    "Segment",
    "TextTask",
    "register_task",
]
