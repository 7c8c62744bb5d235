"""The prompts of a stream, and its scheduling settings. These settings can change while the stream runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

from saccade.pipeline.settings import (
    Names,
    NullIsUnset,
    Questions,
    Seconds,
    SkillText,
    as_list,
    read_number,
    setting,
)

Saccades = Annotated[str, BeforeValidator(read_number), Field(pattern="^([0-8]|auto)$")]


class Prompts(NullIsUnset):
    """The prompts of a stream, which tell the model what to detect or answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    detect: Names = setting(
        [],
        "Labels to detect as boxes, separated by commas; repeatable.",
        more="`nano` knows a fixed list of labels (`saccade models` prints it) and their synonyms. Larger "
        "models accept any phrase. Each label is one prompt and costs some time per frame.",
        metavar="NAME",
        flags=("--detect", "--classes"),
    )
    point: Names = setting([], "Labels to detect as centre points, separated by commas; repeatable.", metavar="NAME")
    segment: Names = setting(
        [],
        "Labels to segment, one object per label, separated by commas; repeatable.",
        more="This needs a model that outlines objects (Moondream 3). Records contain `segments`, each with the"
        " path, the box and the run lengths of the mask.",
        metavar="NAME",
    )
    polygons: bool = setting(False, "Add the polygons of segmentation masks to records.")
    query: Questions = setting(
        [],
        "Questions about every frame, for models that answer questions.",
        more="A question can end with choices, such as 'Is the door open? [yes|no]'. The answer then has a "
        "probability for each choice. `[reasoning]` "
        "at the end lets the model reason before it answers.",
        metavar="TEXT",
    )
    task: Annotated[list[SkillText], BeforeValidator(as_list), Field(max_length=64)] = setting(
        [],
        "Other tasks as SKILL=TEXT, such as caption=short; repeatable.",
        more="Use it for captions, and for tasks that a program registers.",
        metavar="SKILL=TEXT",
    )
    conf: float = setting(
        0.5,
        "Lowest score to report for a box or point, from 0 to 1.",
        more="The score is the model's probability that the list of objects continues with this object and does"
        " not end. A lower value finds more objects and more false positives.",
        metavar="SCORE",
        ge=0,
        le=1,
    )
    max_objects: int = setting(50, "Maximum number of boxes or points per label and frame.", metavar="N", ge=1, le=1000)

    @property
    def nothing(self) -> str | None:
        """The error message if the stream has no prompts, otherwise None."""
        return (
            None
            if self.asked
            else "no prompts: set detect, point or query, such as `detect: person` or --detect person"
        )

    @property
    def prompts(self) -> Prompts:
        """The prompts of the stream."""
        return Prompts.model_construct(**{key: getattr(self, key) for key in Prompts.model_fields})

    @property
    def asked(self) -> list[tuple[str, str]]:
        """All prompts as pairs of task and text, such as ("detect", "person")."""
        named = [(skill, text) for skill in ("detect", "point", "segment", "query") for text in getattr(self, skill)]
        others = (one.partition("=") for one in self.task)
        return [*named, *((skill.strip(), text.strip()) for skill, _, text in others)]


class ShareSettings(NullIsUnset):
    """The scheduling settings of a stream, such as its weight and its maximum frame rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = setting(
        1.0,
        "Scheduling weight: a stream with weight 4 gets four frames for each frame of a stream with weight 1.",
        more="The weight has an effect only while the model is overloaded. A stream that is watched in the demo"
        " has four times its weight.",
        metavar="SHARE",
        ge=0.01,
        le=100,
    )
    max_fps: float | None = setting(
        None,
        "Maximum number of frames per second of a live source that the model processes.",
        metavar="FPS",
        gt=0,
        le=1000,
    )
    deadline_ms: float | None = setting(
        None,
        "Deadline for the result of a live frame, in milliseconds after its arrival.",
        more="A frame that cannot meet the deadline is not processed by the model. It counts as dropped with "
        "the cause `deadline`.",
        metavar="MS",
        gt=0,
        le=60000,
    )

    saccades: Saccades = setting(
        "0",
        "Number of windows (regions in native resolution) per frame, for small objects: 0, a number, or auto.",
        more="A window costs as much as a frame. Windows are placed on motion without a detected object, on "
        "small objects that were detected before, and step by step on the whole frame. auto uses the "
        "engine's idle time, and no windows if a live stream would drop frames. A frame that is not larger"
        " than the model's input has no windows.",
        metavar="N",
    )
    saccade_sweep: Seconds = setting(
        5.0,
        "Time in which the windows of `saccades` cover the whole frame once, in seconds.",
        more="While moving objects use the windows, unchanged parts of the frame can take up to 6 times as long.",
        metavar="SECONDS",
        gt=0,
    )

    @property
    def most_saccades(self) -> int | None:
        """The maximum number of zoom windows per frame. None if the number depends on the engine's idle time."""
        return None if self.saccades == "auto" else int(self.saccades)


class Changes(Prompts, ShareSettings):
    """The settings of a stream that can change while the stream runs: prompts and scheduling settings."""
