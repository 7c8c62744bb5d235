"""The prompts of a stream and its share of the model: settings that can change while the stream runs."""

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
    """The prompts, which tell the model what to detect or answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    detect: Names = setting(
        [],
        "Names to find as boxes; separate by commas or repeat the flag.",
        more="`nano` knows a fixed list (`saccade models` prints it) and synonyms of it. Larger models accept "
        "any phrase. Each name is one prompt and costs some time per frame.",
        metavar="NAME",
        flags=("--detect", "--classes"),
    )
    point: Names = setting([], "Names to find as centre points; separate by commas or repeat the flag.", metavar="NAME")
    segment: Names = setting(
        [],
        "Names to outline, one object each; separate by commas or repeat the flag.",
        more="For models that outline (Moondream 3). Records list `segments` with the path, its box and the "
        "mask's run lengths.",
        metavar="NAME",
    )
    polygons: bool = setting(False, "Add the polygons of outlines to records.")
    query: Questions = setting(
        [],
        "Questions to answer on every frame, for models that answer questions.",
        more="Choices after a question, 'Is the door open? [yes|no]', get a probability each. `[reasoning]` "
        "asks for reasoning before the answer.",
        metavar="TEXT",
    )
    task: Annotated[list[SkillText], BeforeValidator(as_list), Field(max_length=64)] = setting(
        [],
        "Other tasks by skill, such as caption=short; repeat the flag for more.",
        more="For captions, and for tasks that a program registers.",
        metavar="SKILL=TEXT",
    )
    conf: float = setting(
        0.5,
        "Lowest score to report for a box or point, from 0 to 1.",
        more="The score is the model's probability of starting an object against ending the list. A lower "
        "value finds more objects and more false positives.",
        metavar="SCORE",
        ge=0,
        le=1,
    )
    max_objects: int = setting(50, "Maximum number of boxes or points per name and frame.", metavar="N", ge=1, le=1000)

    @property
    def nothing(self) -> str | None:
        """The error message if there are no prompts. None if there are prompts."""
        return (
            None
            if self.asked
            else "no prompts: set detect, point or query, such as `detect: person` or --detect person"
        )

    @property
    def prompts(self) -> Prompts:
        """The prompts without the other settings of a subclass."""
        return Prompts.model_construct(**{key: getattr(self, key) for key in Prompts.model_fields})

    @property
    def asked(self) -> list[tuple[str, str]]:
        """All prompts as pairs of skill and text."""
        named = [(skill, text) for skill in ("detect", "point", "segment", "query") for text in getattr(self, skill)]
        others = (one.partition("=") for one in self.task)
        return [*named, *((skill.strip(), text.strip()) for skill, _, text in others)]


class ShareSettings(NullIsUnset):
    """The scheduling settings of a stream, which define its share of the engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = setting(
        1.0,
        "Share of the model: a stream with 4 gets four frames for each frame of a stream with 1.",
        more="It matters only while the model is overloaded. A stream that is watched in the demo has four "
        "times its weight.",
        metavar="SHARE",
        ge=0.01,
        le=100,
    )
    max_fps: float | None = setting(
        None, "Maximum frames per second of a live source for the model.", metavar="FPS", gt=0, le=1000
    )
    deadline_ms: float | None = setting(
        None,
        "Deadline for the result of a live frame, in milliseconds after its arrival.",
        more="A frame that cannot meet the deadline is dropped before the model and counted as `deadline`.",
        metavar="MS",
        gt=0,
        le=60000,
    )

    saccades: Saccades = setting(
        "0",
        "Windows per frame at full resolution, for small objects: 0, a number, or auto.",
        more="A window costs as much as a frame. Windows go to motion that no box explains, to expected small "
        "objects, and in a slow sweep over the whole frame. auto uses the engine's idle time, and no "
        "window if a live stream would drop frames. Frames no larger than the model's input have no "
        "windows.",
        metavar="N",
    )
    saccade_sweep: Seconds = setting(
        5.0,
        "Seconds within which `saccades` covers each part of a frame.",
        more="While moving objects need the windows, unchanged parts may take up to 6 times as long.",
        metavar="SECONDS",
        gt=0,
    )

    @property
    def most_saccades(self) -> int | None:
        """The maximum number of windows per frame. None means that the idle time of the engine decides."""
        return None if self.saccades == "auto" else int(self.saccades)


class Changes(Prompts, ShareSettings):
    """The settings of a stream that can change while it runs."""
