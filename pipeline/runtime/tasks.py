"""What a stream's configuration asks of its model: its prompts as tasks, and what rules need. Knows no sources."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from saccade.engine.errors import EngineError
from saccade.engine.tasks import TASKS, Segment
from saccade.engine.tasks.task import Task
from saccade.pipeline.config import Prompts, StreamConfig
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.asking import Asker, ModelAskEngine
from saccade.pipeline.events.settings import EventSettings, RuleSettings, check_places
from saccade.pipeline.settings import PlacedError

if TYPE_CHECKING:
    from saccade.engine import Engine


def tasks_for(engine: Engine, prompts: Prompts) -> list[Task]:
    """What the configuration asks for in each frame, in the model's own names; none twice.

    Raises:
        UnknownClassError: if the model does not know a name.
        ConfigError: if there is no such task, or the model cannot do it.
    """
    tasks: dict[Task, None] = {}
    for skill, text in prompts.asked:
        if skill not in TASKS:
            raise ConfigError(f"there is no task '{skill}': give one of {', '.join(TASKS)}")
        if skill not in engine.model.skills:
            raise ConfigError(f"{engine.model.name} can {' and '.join(engine.model.skills)}, not {skill}")
        try:
            task = TASKS[skill].parse(text, prompts.max_objects, prompts.conf)
        except ValueError as error:
            raise ConfigError(f"task {skill}={text}: {error}") from error
        if isinstance(task, Segment) and prompts.polygons:
            task = replace(task, polygon=True)
        tasks |= dict.fromkeys(engine.expand(task))
    return list(tasks)


def names_of(engine: Engine, label: str) -> list[str]:
    """How the model calls a label, itself if it calls it so or does not know it."""
    from saccade.engine import Detect, UnknownClassError

    try:
        return [task.asked for task in engine.expand(Detect(label))]
    except UnknownClassError:
        return [label]


def in_model_names(engine: Engine, prompts: Prompts) -> Prompts:
    """The same prompts in the model's own names, as its results have them; with the labels of a stream's rules."""
    found: dict[str, list[str]] = {"detect": [], "point": []}
    for skill, label in prompts.asked:
        if skill in found:
            found[skill] += [name for name in names_of(engine, label) if name not in found[skill]]
    return prompts.prompts.model_copy(update=found)


def asker_for(engine: Engine, config: EventSettings, *, wait: bool) -> Asker | None:
    """What has the model answer the questions of rules; None if it cannot.

    Args:
        engine: answers them.
        config: the deadline and the weight of the questions.
        wait: whether a stream waits for answers, as a file's does.
    """
    if "query" not in engine.model.skills:
        return None
    return Asker(ModelAskEngine(engine, config.ask_weight), deadline_s=config.ask_deadline, wait=wait)


def check_rules(engine: Engine, ask: Engine, config: StreamConfig) -> None:
    """Check that a stream can have the rules of its configuration.

    Args:
        engine: finds what they name.
        ask: answers what they ask.
        config: of the stream, with the zones and lines that they name.

    Raises:
        PlacedError: if one names a place that is not there, or what the model does not know, or asks something that
            cannot be answered.
    """
    check_places(config.rules, config)
    for number, rule in enumerate(config.rules):
        labels = Prompts.model_construct(detect=rule.condition.labels)
        try:
            tasks_for(engine, labels)
        except (ConfigError, EngineError) as error:
            named = next((rule.when.find(label) for label in rule.condition.labels if f"'{label}'" in str(error)), 0)
            raise PlacedError(str(error), max(0, named), ("rules", number, "when")) from None
        if complaint := _unanswered(ask, rule):
            key = "ask" if rule.ask else "verify" if rule.verify else "attributes"
            raise PlacedError(complaint, 0, ("rules", number, key))


def check_asked(ask: Engine, config: EventSettings) -> None:
    """Check that a model can answer what rules ask.

    Raises:
        ConfigError: if it cannot.
    """
    if complaint := next((found for rule in config.rules if (found := _unanswered(ask, rule))), None):
        raise ConfigError(complaint)


def _unanswered(ask: Engine, rule: RuleSettings) -> str | None:
    if not rule.asks or "query" in ask.model.skills:
        return None
    return f"rule '{rule.name}' asks questions, and {ask.model.name} cannot answer any: give another one for that, ask"
