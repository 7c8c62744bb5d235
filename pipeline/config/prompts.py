"""What is found in a stream's frames and how much of the model it gets: the settings that may change while it runs.

Knows no sources, rules or outputs.
"""

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
    """What to find."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    detect: Names = setting(
        [],
        "Names to find as boxes; with commas, or the flag again, for more.",
        more="`nano` knows a closed list (`saccade models` prints it) and everyday synonyms of it; larger models take "
        "any phrase. One prompt a name: every name costs a little time on every frame.",
        metavar="NAME",
        flags=("--detect", "--classes"),
    )
    point: Names = setting(
        [], "Names to find as points at their centres; with commas, or the flag again, for more.", metavar="NAME"
    )
    segment: Names = setting(
        [],
        "Names to outline, one object each; with commas, or the flag again, for more.",
        more="For models that outline (Moondream 3). Records list `segments` with the path, its box and the mask's run "
        "lengths.",
        metavar="NAME",
    )
    polygons: bool = setting(False, "List the polygons of outlines in records, too.")
    query: Questions = setting(
        [],
        "Questions to answer in text on every frame, for models that can read and write.",
        more="Choices behind a question, 'Is the door open? [yes|no]', get a probability each; `[reasoning]` lets the "
        "model reason before it answers.",
        metavar="TEXT",
    )
    task: Annotated[list[SkillText], BeforeValidator(as_list), Field(max_length=64)] = setting(
        [],
        "Any other task by its skill, such as caption=short; the flag again for more.",
        more="For what the other settings do not cover: captions, and tasks that a program registers.",
        metavar="SKILL=TEXT",
    )
    conf: float = setting(
        0.5,
        "Least score of a box or point, from 0 to 1.",
        more="The score is the model's own probability of beginning an object against stopping, so 0.5 is its own "
        "choice; lower finds more, and more of it wrong.",
        metavar="SCORE",
        ge=0,
        le=1,
    )
    max_objects: int = setting(50, "Most boxes or points for one name in one frame.", metavar="N", ge=1, le=1000)

    @property
    def nothing(self) -> str | None:
        """The complaint that there is nothing to find; None if there is something."""
        return (
            None
            if self.asked
            else "nothing to look for: give detect, point or query, such as `detect: person` or --detect person"
        )

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Every task as its skill and what is asked."""
        named = [(skill, text) for skill in ("detect", "point", "segment", "query") for text in getattr(self, skill)]
        others = (one.partition("=") for one in self.task)
        return [*named, *((skill.strip(), text.strip()) for skill, _, text in others)]


class ShareSettings(NullIsUnset):
    """What a stream gets of the model, beside others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = setting(
        1.0,
        "Share of the model beside other streams: with 4, four frames for each of a stream with 1.",
        more="Only while there are more frames than the model can take. A stream that is watched in the demo has four "
        "times its weight.",
        metavar="SHARE",
        ge=0.01,
        le=100,
    )
    max_fps: float | None = setting(
        None, "Most frames a second of a live source that the model is given.", metavar="FPS", gt=0, le=1000
    )
    deadline_ms: float | None = setting(
        None,
        "Milliseconds after a live frame's arrival by which its result is wanted.",
        more="A frame that cannot make it is dropped before the model is given it, and counted as `deadline`.",
        metavar="MS",
        gt=0,
        le=60000,
    )

    saccades: Saccades = setting(
        "0",
        "Windows of a frame that are looked at again at native resolution: 0, a number, or auto; for small objects.",
        more="A window costs as much as a frame. It goes where something moves that no box explains, where small "
        "objects are expected, and in a slow sweep over the whole frame. auto takes as many as the engine has idle "
        "time for, and none where a live stream would lose frames. Frames that are no larger than the model sees them "
        "have no windows.",
        metavar="N",
    )
    saccade_sweep: Seconds = setting(
        5.0,
        "Within how many seconds each part of a frame is looked at by `saccades`.",
        more="Where moving objects need the windows, later looks at what has not changed take up to 6 times as long.",
        metavar="SECONDS",
        gt=0,
    )

    @property
    def most_saccades(self) -> int | None:
        """Most windows a frame; None for as many as the engine has idle time for."""
        return None if self.saccades == "auto" else int(self.saccades)


class Changes(Prompts, ShareSettings):
    """What may change of a stream while it runs."""
