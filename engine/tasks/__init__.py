"""The tasks of the engine (detect, point, gaze, segment, query, caption), and the task registry.

To add a task, subclass `Task` in a new file and register the class with `register_task`.
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
