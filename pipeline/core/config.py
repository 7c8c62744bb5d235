"""What a run is told to do: one validated object made of a YAML file and of the command line, which wins.

Every key is also a flag of `saccade run`, under the same name. Knows nothing of models, sources or sinks beyond names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from saccade.pipeline.core.bounded_queue import QueuePolicy
from saccade.pipeline.core.errors import ConfigError
from saccade.pipeline.core.stream_names import check_name

MAX_DEPTH = 8

KeyPath = tuple[int | str, ...]
Where = tuple[int, int]
"""Line and column in a YAML file, both from 1."""


def _seconds(value: object) -> object:
    """Read `90`, `1:30` or `0:01:30` as seconds; leave anything else to the validator."""
    if isinstance(value, str) and re.fullmatch(r"(\d+:){1,2}\d+(\.\d+)?", value.strip()):
        total = 0.0
        for part in value.strip().split(":"):
            total = total * 60 + float(part)
        return total
    return value


def _names(value: object) -> object:
    """Read one name, or several with commas between them, as a list."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple):
        return [item.strip() if isinstance(item, str) else item for item in value]
    return value


def _questions(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _plain(value: str) -> str:
    if "\0" in value:  # which would end a path, and raise wherever one is used
        raise ValueError("should have no NUL character in it")
    return value


Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_plain)]
Names = Annotated[list[Text], BeforeValidator(_names), Field(max_length=64)]
Questions = Annotated[list[Text], BeforeValidator(_questions), Field(max_length=64)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]

STREAM = "{stream}"
"""What the name of a stream takes the place of in an output, so that each stream has one of its own."""


class Prompts(BaseModel):
    """What to look for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    detect: Names = Field([], description="Names to find as boxes.")
    point: Names = Field([], description="Names to find as points.")
    query: Questions = Field([], description="Questions to answer in text.")
    conf: float = Field(0.5, ge=0, le=1, description="Least score of a box or point, from 0 to 1.")
    max_objects: int = Field(50, ge=1, le=1000, description="Most boxes or points for one name in one frame.")

    @property
    def nothing(self) -> str | None:
        """The complaint that nothing is looked for; None if something is."""
        if self.detect or self.point or self.query:
            return None
        return "nothing to look for: give detect, point or query, such as detect: person"


class StreamConfig(Prompts):
    """One stream: where it comes from, what to look for in it, and how."""

    name: str | None = Field(None, description="What its records are called; made from the source if left out.")
    source: Text = Field(description="What to watch: a video file, an image, a folder, a live address or a webcam.")
    tiles: int = Field(1, ge=1, le=8, description="Look at N x N overlapping parts as well, for small objects; slower.")
    vid_stride: int = Field(1, ge=1, description="Look at every Nth frame of the source.")
    start: Seconds | None = Field(None, description="Where in the source to begin: seconds, or 1:30.")
    end: Seconds | None = Field(None, description="Where in the source to stop: seconds, or 1:30.")
    hwaccel: Literal["auto", "cuda", "none"] = Field(
        "auto", description="Decode live video on the GPU: auto (if there is one), cuda (insist) or none."
    )
    rtsp_transport: Literal["tcp", "udp"] = Field("tcp", description="How RTSP cameras send their frames.")
    queue: str | None = Field(
        None,
        description="Frames waiting for the model: 'wait' holds the source back and loses none, 'newest' keeps only "
        "the newest, 'keep N' keeps the newest N. By itself, newest for live sources and wait for files.",
    )
    in_flight: int = Field(2, ge=1, le=64, description="Frames given to the model at a time.")

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str | None) -> str | None:
        return None if value is None else check_name(value)

    @field_validator("queue")
    @classmethod
    def _queue_policy(cls, value: str | None) -> str | None:
        if value is not None:
            QueuePolicy.parse(value)
        return value

    @field_validator("end")
    @classmethod
    def _after_start(cls, value: float | None, info: Any) -> float | None:
        start = info.data.get("start")
        if value is not None and start is not None and value <= start:
            raise ValueError(f"should be later than start, {start:g} s")
        return value


class ListedStream(StreamConfig):
    """One of several streams, with outputs of its own."""

    sinks: list[Text] = Field([], description="Where its results go, besides the outputs of all streams.")


class RunConfig(StreamConfig):
    """Everything `saccade run` can be told. Paths are relative to the directory the command is run in."""

    source: Text = Field("", description=StreamConfig.model_fields["source"].description)
    streams: list[ListedStream] = Field(
        [], description="Several streams instead of source; each takes from here what it does not say itself."
    )
    model: Text = Field("nano", description="Embedded model, checkpoint folder, or hub id; see `saccade models`.")
    device: Text = Field("auto", description="Where the model runs: auto (the GPU if any), cpu, cuda or cuda:N.")
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = Field(
        None, description="What the model computes in; by itself float32 on a CPU and for small models, else bfloat16."
    )
    out: Text | None = Field(None, description="Annotated video to write, an .mp4 file.")
    jsonl: Text | None = Field(None, description="Results to write, one JSON record a frame and line.")
    sinks: list[Text] = Field(
        [], description="Where else results go: ws://, mqtt://, https:// or whep: addresses, .mp4 and .jsonl files."
    )
    display: bool = Field(False, description="Show the annotated frames in a window; needs a screen.")
    http: Text | None = Field(None, description="HOST:PORT to serve /healthz, /metrics and /streams on.")
    http_token: Text | None = Field(None, repr=False, description="What a client of http must know.")

    @field_validator("http")
    @classmethod
    def _place(cls, value: str | None) -> str | None:
        if value is not None:
            parse_place(value)
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.source and self.streams:
            raise ValueError("there are a source and streams: give one or the other")
        if not (self.source or self.streams or self.http):
            raise ValueError(f"source is missing: {type(self).model_fields['source'].description}")
        for number, stream in enumerate(self.each()):
            if stream.nothing:
                raise ValueError(f"streams[{number}]: {stream.nothing}" if self.streams else stream.nothing)
        names = [stream.name for stream in self.streams if stream.name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two streams are called '{twice}'")
        return self

    def each(self) -> list[ListedStream]:
        """The streams, each with everything it is told by itself or for all of them."""
        common = {key: getattr(self, key) for key in StreamConfig.model_fields if key in self.model_fields_set}
        if self.source:
            return [ListedStream.model_validate(common)]
        for key in ("source", "name"):
            common.pop(key, None)
        return [
            stream.model_copy(update={key: common[key] for key in common.keys() - stream.model_fields_set})
            for stream in self.streams
        ]


def parse_place(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`, `:PORT`, `PORT` or `HOST`; what is left out is 127.0.0.1 and 8080.

    Raises:
        ValueError: if it is none of these.
    """
    try:
        parts = urlsplit(f"//:{text}" if text.isdecimal() else f"//{text}")
        port = 8080 if parts.port is None else parts.port
    except ValueError:
        parts, port = urlsplit(""), -1
    if port < 0 or parts.username is not None or parts.path or parts.query:
        raise ValueError("should be HOST:PORT, such as 127.0.0.1:8080")
    return parts.hostname or "127.0.0.1", port


def load(path: Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Read `path`, if given, and put `overrides` (the command line's values, by key) over it.

    Raises:
        ConfigError: if the file cannot be read, is not YAML, or a value anywhere is not what it should be.
    """
    values, places = _read_yaml(path) if path is not None else ({}, {})
    if overrides.keys() & {"source", "streams"}:
        values = {key: value for key, value in values.items() if key not in ("source", "streams")}
    try:
        return RunConfig.model_validate({**values, **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"]
        known = ListedStream if key[:1] == ("streams",) and len(key) > 2 else RunConfig
        if path is None or (key[:1] and key[0] in overrides):
            raise ConfigError(explain(first, known, from_file=False)) from None
        nearest = next(places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places)
        raise ConfigError(f"{_at(path, nearest)}: {explain(first, known)}") from None


def explain(error: ErrorDetails, known: type[BaseModel], *, from_file: bool = True) -> str:
    """Turn pydantic's error into half a line: which key or flag, and what is wrong with it.

    Args:
        error: as pydantic tells it.
        known: whose keys there are, at the place of the error.
        from_file: name it as a key; otherwise as a flag of the command line.
    """
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not error["loc"]:
        return reason
    key = next((step for step in reversed(error["loc"]) if isinstance(step, str)), str(error["loc"][0]))
    if error["type"] == "missing":
        return f"{key} is missing: {known.model_fields[key].description}"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key.replace("-", "_"), known.model_fields, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known.model_fields)}"
        return f"unknown key '{key}'; {hint}"
    first, *inside = error["loc"]
    called = str(first)
    if not from_file:
        called, inside = ("SOURCE", []) if key == "source" else (f"--{called.replace('_', '-')}", inside)
    called += "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in inside)
    given = error["input"]
    # An address of a sink holds keys in its path, and what is not one value may hold one anywhere.
    shown = isinstance(given, str | int | float) and key not in ("http", "http_token", "sinks")
    return f"{called}: {reason}" + (f", got {given!r}" if shown else "")


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, Where]]:
    """The file's mapping, and the place of every key and list item in it by its path."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        places: dict[KeyPath, Where] = {(): (1, 1)}
        if root is not None:
            _note_places(path, root, (), places)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}{place}: broken YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: broken YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1:1: should be a mapping of keys to values, not a {type(values).__name__}")
    return values, places


def _note_places(path: Path, node: yaml.Node, at: KeyPath, places: dict[KeyPath, Where]) -> None:
    """Write down where everything stands; refuse a key given twice, of which YAML would quietly keep the last."""
    if len(at) > MAX_DEPTH:  # also ends a document whose aliases lead back into itself
        raise ConfigError(f"{path}: nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*at, str(key.value))
            where = _where(key)
            if inner in places:
                raise ConfigError(f"{_at(path, where)}: '{key.value}' is given twice, first in line {places[inner][0]}")
            places[inner] = where
            _note_places(path, value, inner, places)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            places[(*at, number)] = _where(item)
            _note_places(path, item, (*at, number), places)


def _where(node: yaml.Node) -> Where:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _at(path: Path, where: Where) -> str:
    return f"{path}:{where[0]}:{where[1]}"
