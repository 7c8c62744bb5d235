"""The settings of rules, questions and the event store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.events.conditions import Condition, parse
from saccade.pipeline.settings import FileText, Names, NullIsUnset, PlacedError, Seconds, Text, is_onvif, setting

MAX_RULES = 64


class Threshold(NullIsUnset):
    """Two probability thresholds with hysteresis. Between the thresholds, the previous decision remains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    on: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description="lowest probability at which the answer starts to count as the expected answer",
    )
    off: float = Field(
        default=0.4, ge=0, le=1, description="probability below which the answer stops counting as the expected answer"
    )

    @field_validator("off")
    @classmethod
    def _below_on(cls, value: float, info: Any) -> float:
        if value > info.data.get("on", 1.0):
            raise ValueError(f"the threshold `off` must not be above the threshold `on` ({info.data['on']:g})")
        return value


class AttributeSettings(NullIsUnset):
    """A question about an attribute of an object, such as a colour. The model is asked once per track."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: Text = Field(description="the question, such as What colour is the jacket?")
    choices: Names = Field([], description="allowed answers; empty for free text")

    @field_validator("choices")
    @classmethod
    def _a_choice(cls, value: list[str]) -> list[str]:
        if len(value) == 1:
            raise ValueError("list two or more choices, or remove `choices` to allow any answer")
        return value


def _looks(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    found = re.fullmatch(r"(\d+)\s+of\s+(\d+)(\s+frames)?", text.strip())
    if not found or not 1 <= int(found[1]) <= int(found[2]) <= 64:
        raise ValueError("confirm must be N of M frames, M at most 64; for example 3 of 5 frames")
    return int(found[1]), int(found[2])


def _question(value: object) -> object:
    return {"question": value} if isinstance(value, str) else value


def _named_keys(value: object) -> object:
    """Rename the keys True and False to `on` and `off`, because YAML parses `on` and `off` as booleans."""
    if isinstance(value, Mapping):
        return {
            {True: "on", False: "off"}.get(key, key) if isinstance(key, bool) else key: v for key, v in value.items()
        }
    return value


Attribute = Annotated[AttributeSettings, BeforeValidator(_question)]


def _require_object(value: object, info: Any, *without: str) -> None:
    """Check that no question is set for a condition without an object, such as `absent`."""
    if value and "when" in info.data and (kind := parse(info.data["when"]).kind) in without:
        raise ValueError(
            f"questions cannot be used with the condition '{kind}', because there is no object to ask about"
        )


class RuleSettings(NullIsUnset):
    """The settings of one rule, such as the condition that begins and ends an event."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field(description="name of the rule and its events: letters, digits, '.', '_' and '-'")
    when: Text = Field(description="the condition, such as person in door for 10s")
    cooldown: Seconds = Field(0.0, description="seconds after an event in which no new event begins")
    ask: Text | None = Field(None, description="yes-or-no question, such as Is there a helmet?")
    scope: Literal["track", "frame"] = Field(
        "track", description="subject of the question: the track's crop, or the whole frame"
    )
    expect: Literal["yes", "no"] = Field("yes", description="answer that begins an event")
    threshold: Annotated[Threshold, BeforeValidator(_named_keys)] = Field(
        Threshold(), description="probabilities of the expected answer, as {on: 0.8, off: 0.4}"
    )
    again: Seconds = Field(5.0, description="seconds until the question of `ask` is repeated")
    verify: Text | None = Field(
        None, description="yes-or-no question that confirms a track; an event begins only if the answer is yes"
    )
    attributes: dict[Text, Attribute] = Field(
        {}, max_length=8, description="questions asked once per track, by attribute name"
    )
    keep: Seconds | None = Field(None, description="how long events of this rule are stored; default: store_keep")
    confirm: Text | None = Field(
        None, description="N of M frames: an object counts after N detections in M frames, such as 3 of 5 frames"
    )

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str) -> str:
        if not re.fullmatch(r"[\w][\w.-]{0,63}", value):
            raise ValueError("a rule name should be up to 64 letters, digits, '.', '_' and '-'")
        return value

    @field_validator("when")
    @classmethod
    def _readable(cls, value: str) -> str:
        parse(value)
        return value

    @field_validator("confirm")
    @classmethod
    def _looks_of(cls, value: str | None) -> str | None:
        _looks(value)
        return value

    @field_validator("ask", "verify")
    @classmethod
    def _about_something(cls, value: str | None, info: Any) -> str | None:
        _require_object(value, info, "removed", "reports")
        return value

    @field_validator("scope", "expect", "threshold", "again")
    @classmethod
    def _of_a_question(cls, value: Any, info: Any) -> Any:
        if info.data.get("ask", "") is None and value != cls.model_fields[info.field_name].default:
            raise ValueError("this key needs a question: add the key ask to the rule")
        return value

    @field_validator("attributes")
    @classmethod
    def _of_objects(cls, value: Any, info: Any) -> Any:
        _require_object(value, info, "absent", "removed", "reports")
        return value

    @field_validator("expect", mode="before")
    @classmethod
    def _not_a_boolean(cls, value: object) -> object:
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value  # YAML parses no as false

    @property
    def asks(self) -> bool:
        """Whether the rule asks the model questions."""
        return bool(self.ask or self.verify or self.attributes)

    @property
    def confirm_looks(self) -> tuple[int, int]:
        """The setting `confirm` as (k, n): a track must be detected on k of n frames."""
        return _looks(self.confirm)

    @property
    def condition(self) -> Condition:
        """The parsed condition of the rule, from the key `when`."""
        return parse(self.when)


def _named(value: object) -> object:
    """Parse rules that are given as strings such as `name=condition` on the command line."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        raise ValueError("expected a list of rules, such as [{name: visitor, when: person in door for 10s}]")
    if not isinstance(value, list):
        return value
    rules: list[Any] = []
    for one in value:
        if isinstance(one, str):
            name, equals, when = one.partition("=")
            if not equals:
                raise ValueError("expected a rule as NAME=CONDITION, such as visitor=person in door for 10s")
            one = {"name": name.strip(), "when": when.strip()}
        rules.append(one)
    names = [rule.get("name") if isinstance(rule, Mapping) else getattr(rule, "name", None) for rule in rules]
    if twice := next((name for name in names if name is not None and names.count(name) > 1), None):
        raise ValueError(f"two rules have the name '{twice}'; use a different name for each")
    return rules


Rules = Annotated[list[RuleSettings], BeforeValidator(_named), Field(max_length=MAX_RULES)]


class EventSettings(NullIsUnset):
    """The event settings of one stream, in the configuration file or the HTTP API."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: Rules = setting(
        [],
        "Rule for events, as NAME=CONDITION, such as visitor=person in door for 10s; repeatable.",
        more="In a file: [{name: visitor, when: person in door for 10s, cooldown: 60s}]. Conditions: person "
        "in door for 10s; person crosses gate outward; count of person in lobby > 5 for 30s; person "
        "absent from desk for 5m; any between 22:00 and 06:00; car stationary in yard for 5m. Rules "
        "detect their labels and turn tracking on. `saccade rules check FILE` checks rules; `saccade "
        "backtest FILE VIDEO` tries them on a recording. Events go to every output.",
        metavar="NAME=CONDITION",
        flags=("--rule",),
    )

    ask_deadline: Seconds = setting(
        2.0, "Time limit for the answer to a rule's question; later answers are ignored.", metavar="SECONDS", gt=0
    )
    ask_weight: float = setting(
        4.0,
        "Scheduling weight of all questions of rules together; see `weight`.",
        metavar="WEIGHT",
        ge=0.001,
        le=1000,
    )
    clips: bool = setting(True, "Store a clip and a snapshot of each event.")
    clip_before: Seconds = setting(5.0, "Seconds of video before the event in a clip.", metavar="SECONDS", le=60)
    clip_after: Seconds = setting(
        5.0,
        "Seconds of video after the event in a clip.",
        more="Clips are cut from the packets of the camera without re-encoding. They start at a key frame.",
        metavar="SECONDS",
        le=60,
    )
    began: datetime | None = setting(
        None,
        "Local start time of a file, for rules with `between`: 2026-01-01 21:50; default: now.",
        metavar="TIME",
    )

    @property
    def rule_labels(self) -> list[str]:
        """The labels of all rules, without duplicates."""
        return list(dict.fromkeys(label for rule in self.rules for label in rule.condition.labels))


def check_places(rules: list[RuleSettings], regions: Regions) -> None:
    """Check that every zone and line in the rules exists.

    Raises:
        PlacedError: if a zone or line is missing.
    """
    for number, rule in enumerate(rules):
        condition = rule.condition
        if condition.place is None:
            continue
        kind: Literal["line", "zone"] = "line" if condition.kind == "crosses" else "zone"
        known = regions.lines if kind == "line" else regions.zones
        if kind == "zone" and condition.place in known and regions.zones[condition.place].exclude:
            message = f"rule '{rule.name}': zone '{condition.place}' excludes objects, so the rule can never match"
            raise PlacedError(message, condition.place_at, ("rules", number, "when"))
        if condition.place not in known:
            names = ", ".join(known) or "none"
            message = f"rule '{rule.name}': there is no {kind} '{condition.place}'; {kind}s: {names}"
            raise PlacedError(message, condition.place_at, ("rules", number, "when"))


def check_signals(rules: list[RuleSettings], source: str | None) -> None:
    """Check that the source of a stream supports rules with the condition `camera reports`.

    Raises:
        PlacedError: if the source is a camera without an ONVIF address.
    """
    if source is None or "://" not in source or is_onvif(source):
        return
    for number, rule in enumerate(rules):
        if rule.condition.kind == "reports":
            message = f"rule '{rule.name}': only a source onvif://user:password@HOST reports {rule.condition.signal}"
            raise PlacedError(message, rule.condition.place_at, ("rules", number, "when"))


def _model(value: object) -> object:
    return {"model": value} if isinstance(value, str) else value


class AskSettings(NullIsUnset):
    """The settings of a separate model that answers questions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: FileText = Field(description="included model, checkpoint folder or Hugging Face Hub ID")
    device: Text = Field("auto", description="device of the model: auto, cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = Field(
        None, description="data type of the weights and activations"
    )
    kv_dtype: Literal["fp8"] | None = Field(None, description="data type of the KV cache")
    refiner: FileText | None = Field(None, description="model that refines masks: a file or Hugging Face Hub ID")


AskConfig = Annotated[AskSettings, BeforeValidator(_model)]


class KeepSettings(NullIsUnset):
    """Settings that all streams share: the model that answers questions, and the event store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ask: AskConfig | None = setting(
        None,
        "Model for the questions of rules; it must answer questions.",
        more="A file can also set {model: …, device: cuda:1, dtype: fp8}. The default is the model that "
        "processes the frames.",
        metavar="MODEL",
        flags=("--ask-model",),
    )
    store: FileText | None = setting(
        None,
        "Folder for stored events, object counts per minute and paths of tracks.",
        more="The HTTP server shows the events under /events. Only one process can write the folder at a time. "
        "Stored data survives a killed process.",
        metavar="DIR",
    )
    store_keep: Seconds | None = setting(
        None, "How long events are stored, such as 30d; the key `keep` of a rule overrides this.", metavar="TIME"
    )
    store_max_gb: float | None = setting(
        None, "Maximum size of all clips and snapshots; the oldest events are deleted first.", metavar="GB", gt=0
    )
