"""The table of all tasks, and the checks of their arguments. Knows no task."""

from __future__ import annotations

import math
from typing import Any

from saccade.engine.models.protocol import Ref
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


def require_refs(refs: Any) -> tuple[Ref, ...]:
    """Points (x, y) and boxes (x1, y1, x2, y2) as tuples; raise ValueError for anything else."""
    try:
        return tuple(_ref(one) for one in refs)
    except TypeError:
        raise ValueError(f"refs are several points or boxes; got {refs!r}") from None


def _ref(value: Any) -> Ref:
    numbers = tuple(value)
    if len(numbers) not in (2, 4) or not all(is_number(one) and 0 <= one <= 1 for one in numbers):
        raise ValueError(f"a ref is a point (x, y) or a box (x1, y1, x2, y2) of numbers from 0 to 1; got {value!r}")
    if len(numbers) == 4 and not (numbers[0] <= numbers[2] and numbers[1] <= numbers[3]):
        raise ValueError(f"a box is (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2; got {value!r}")
    return numbers
