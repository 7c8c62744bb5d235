"""The table of all tasks, and the checks of their arguments. Knows no task."""

from __future__ import annotations

import math

from saccade.engine.tasks.task import Task

TASKS: dict[str, type[Task]] = {}
"""Every task by its skill, in the order in which results and configurations list them."""


def register_task(task: type[Task]) -> type[Task]:
    """Make a task known by its skill.

    Raises:
        ValueError: if another task has the same skill.
    """
    if TASKS.setdefault(task.skill, task) is not task:
        raise ValueError(f"there is a task '{task.skill}' already")
    return task


def require_text(name: str, value: object) -> None:
    """Raise ValueError unless a value is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is a string that is not empty; got {value!r}")


def require_count(name: str, value: object) -> None:
    """Raise ValueError unless a value is a whole number of 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is a whole number of 0 or more; got {value!r}")


def is_number(value: object) -> bool:
    """Whether a value is a number, and not nan."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def require_conf(value: object) -> None:
    """Raise ValueError unless a value is a number from 0 to 1."""
    if not isinstance(value, int | float) or not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"conf is a number from 0 to 1; got {value!r}")
