"""Creates the tasks of a stream from its prompts, and from the labels and questions of its rules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from saccade.engine.errors import EngineError
from saccade.engine.tasks import TASKS, Segment
from saccade.engine.tasks.task import Task
from saccade.pipeline.config import Prompts, StreamConfig
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.asking import Asker, ModelAskEngine
from saccade.pipeline.events.settings import EventSettings, RuleSettings, check_places, check_signals
from saccade.pipeline.settings import PlacedError

if TYPE_CHECKING:
    from saccade.engine import Engine


def tasks_for(engine: Engine, prompts: Prompts) -> list[Task]:
    """Convert prompts to tasks for the model.

    Each label is replaced by matching labels of the model, without duplicates.

    Raises:
        UnknownClassError: if the model does not know a label.
        ConfigError: if the task does not exist, or the model does not support it.
    """
    tasks: dict[Task, None] = {}
    for skill, text in prompts.asked:
        if skill not in TASKS:
            raise ConfigError(f"unknown task '{skill}': use one of {', '.join(TASKS)}")
        if skill not in engine.model.skills:
            raise ConfigError(
                f"{engine.model.name} does not support {skill}; it supports {' and '.join(engine.model.skills)}"
            )
        try:
            task = TASKS[skill].parse(text, prompts.max_objects, prompts.conf)
        except ValueError as error:
            raise ConfigError(f"task {skill}={text}: {error}") from error
        if isinstance(task, Segment) and prompts.polygons:
            task = replace(task, polygon=True)
        tasks |= dict.fromkeys(engine.expand(task))
    return list(tasks)


def names_of(engine: Engine, label: str) -> list[str]:
    """Return the model's names for a label. If the model does not know the label, return the label itself."""
    from saccade.engine import Detect, UnknownClassError

    try:
        return [task.asked for task in engine.expand(Detect(label))]
    except UnknownClassError:
        return [label]


def in_model_names(engine: Engine, prompts: Prompts) -> Prompts:
    """Replace each label of the prompts and rules by the model's own name for the label. Return the new prompts."""
    found: dict[str, list[str]] = {"detect": [], "point": []}
    for skill, label in prompts.asked:
        if skill in found:
            found[skill] += [name for name in names_of(engine, label) if name not in found[skill]]
    return prompts.prompts.model_copy(update=found)


def asker_for(engine: Engine, config: EventSettings, *, wait: bool) -> Asker | None:
    """Return an `Asker`, which asks the model the questions of rules. Return None if the model cannot answer questions.

    Args:
        engine: the engine.
        config: timeout and scheduling weight of the questions.
        wait: whether the stream waits for each answer. True for a video file, False for a live stream.
    """
    if "query" not in engine.model.skills:
        return None
    return Asker(ModelAskEngine(engine, config.ask_weight), deadline_s=config.ask_deadline, wait=wait)


def check_rules(engine: Engine, ask: Engine, config: StreamConfig) -> None:
    """Check that the rules of a stream can work with its zones and lines, its source and the models.

    Args:
        engine: the engine for frames.
        ask: the engine for questions.
        config: configuration of the stream.

    Raises:
        PlacedError: if a zone, line, signal or label of a rule does not exist, or no model can answer its question.
    """
    check_places(config.rules, config)
    check_signals(config.rules, config.source)
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
    """Check that a model can answer the questions in rules.

    Raises:
        ConfigError: if the model cannot answer questions.
    """
    if complaint := next((found for rule in config.rules if (found := _unanswered(ask, rule))), None):
        raise ConfigError(complaint)


def _unanswered(ask: Engine, rule: RuleSettings) -> str | None:
    if not rule.asks or "query" in ask.model.skills:
        return None
    return f"rule '{rule.name}' asks questions, which {ask.model.name} cannot answer: set ask to a model that can"
