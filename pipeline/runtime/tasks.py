"""What a stream asks of its model: from prompts to tasks and back, for one that opens and for a run that goes on.

Knows no sources and no outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from saccade.engine.tasks import TASKS, ObjectsTask
from saccade.engine.tasks.task import Task
from saccade.pipeline.analytics.analyze import analyze_stage
from saccade.pipeline.config import Prompts, ShareSettings, StreamConfig
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.asking import Asker, ModelAskEngine
from saccade.pipeline.events.settings import EventSettings, RuleSettings
from saccade.pipeline.events.stage import EventStage, event_stage
from saccade.pipeline.runtime.run import Run

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
        tasks |= dict.fromkeys(engine.expand(task))
    return list(tasks)


def names_of(engine: Engine, label: str) -> list[str]:
    """How the model calls a label, itself if it calls it so or does not know it."""
    from saccade.engine import Detect, UnknownClassError

    try:
        return [task.asked for task in engine.expand(Detect(label))]
    except UnknownClassError:
        return [label]


def prompts_of(tasks: Iterable[Task]) -> Prompts:
    """The prompts of a configuration that stand for these tasks: the inverse of `tasks_for`."""
    asked: dict[str, Any] = {}
    for task in tasks:
        if task.skill in Prompts.model_fields:
            asked.setdefault(task.skill, []).append(task.asked)
        else:
            asked.setdefault("task", []).append(f"{task.skill}={task.asked}")
        if isinstance(task, ObjectsTask):
            asked["conf"], asked["max_objects"] = task.conf, task.max_objects
    return Prompts.model_construct(**asked)


def settings_of(run: Run) -> StreamConfig:
    """The configuration that stands for a run as it is now: as it was opened, with what has been changed since.

    Raises:
        ConfigError: if a program gave its parts.
    """
    if not isinstance(run.settings, StreamConfig):
        raise ConfigError(f"'{run.name}' was started by a program, not from a configuration")
    prompts = prompts_of(run.tasks)
    changed = {key: getattr(prompts, key) for key in Prompts.model_fields}
    changed |= {key: getattr(run.share, key) for key in ShareSettings.model_fields}
    if (stage := analyze_stage(run.stages)) is not None:
        changed |= {"zones": stage.regions.zones, "lines": stage.regions.lines}
    if (watching := event_stage(run.stages)) is not None:
        changed |= {"rules": list(watching.rules)}
    return run.settings.model_copy(update={**changed, "name": run.name})


def change_share(run: Run, wanted: ShareSettings) -> None:
    """Change what a stream gets of the model; what `wanted` leaves out stays as it is."""
    changed = {key: getattr(wanted, key) for key in ShareSettings.model_fields if key in wanted.model_fields_set}
    if changed:
        run.share = replace(run.share, **changed)


def change_prompts(run: Run, engine: Engine, wanted: Prompts) -> None:
    """Change what is found in a run from the next frame on; prompts that `wanted` leaves out stay as they are.

    Raises:
        ConfigError: if nothing would be asked for, or the model cannot do it.
        UnknownClassError: if the model does not know a name.
    """
    changed = {key: getattr(wanted, key) for key in wanted.model_fields_set if key in Prompts.model_fields}
    if not changed:
        return
    prompts = prompts_of(run.tasks).model_copy(update=changed)
    if prompts.nothing:
        raise ConfigError(prompts.nothing)
    stage = event_stage(run.stages)
    run.tasks = [*(tasks := tasks_for(engine, prompts)), *missing_tasks(engine, tasks, stage.rules if stage else ())]


def missing_tasks(engine: Engine, tasks: Sequence[Task], rules: Iterable[RuleSettings]) -> list[Task]:
    """The tasks that find what rules name and none of `tasks` finds, with the score and the limit of these.

    Raises:
        UnknownClassError: if the model does not know a name.
    """
    found = {task.asked for task in tasks}
    labels = dict.fromkeys(label for rule in rules for label in rule.condition.labels)
    missing = [label for label in labels if not found.issuperset(names_of(engine, label))]
    alike = prompts_of(tasks).model_copy(update={"detect": missing, "point": [], "query": [], "task": []})
    return tasks_for(engine, alike) if missing else []


def set_asker(stage: EventStage, engine: Engine, config: EventSettings, *, wait: bool) -> None:
    """Have a model answer what rules ask, if it can.

    Raises:
        ConfigError: if a rule asks something, and it cannot.
    """
    if "query" in engine.model.skills:
        asked = ModelAskEngine(engine, config.ask_weight)
        stage.asker = Asker(asked, deadline_s=config.ask_deadline, wait=wait)
    check_asked(stage, stage.rules, engine.model.name)


def check_asked(stage: EventStage, rules: Iterable[RuleSettings], model: str = "the model") -> None:
    """Check that what rules ask can be answered.

    Raises:
        ConfigError: if it cannot.
    """
    asking = next((rule.name for rule in rules if rule.asks), None)
    if asking is not None and stage.asker is None:
        raise ConfigError(
            f"rule '{asking}' asks questions, and {model} cannot answer any: give another one for that, ask"
        )
