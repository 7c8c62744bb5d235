"""Every setting of a run, declared once: its type, default, constraint and description, and its command-line flag.

The command line's flags (`cli.options`), the manual (`cli.manual`) and the HTTP API all come from these models. Knows
nothing of models, sources or sinks beyond names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.analytics.stages import GATES, STAGES, check_names
from saccade.pipeline.core.bounded_queue import QueuePolicy
from saccade.pipeline.core.stream_names import check_name
from saccade.pipeline.events.settings import EventSettings, KeepSettings, check_places
from saccade.pipeline.settings import (
    Names,
    PlacedError,
    Questions,
    Seconds,
    SkillText,
    Text,
    as_list,
    setting,
    split_names,
)

STREAM = "{stream}"
"""Replaced by the name of the stream in the address or path of an output, so that each stream has its own."""


class Prompts(BaseModel):
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
        more="For what `detect`, `point` and `query` do not cover: captions, and tasks that a program registers.",
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
        return None if self.asked else "nothing to look for: give detect, point or query, such as detect: person"

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Every task as its skill and what is asked."""
        named = [(skill, text) for skill in ("detect", "point", "query") for text in getattr(self, skill)]
        others = (one.partition("=") for one in self.task)
        return [*named, *((skill.strip(), text.strip()) for skill, _, text in others)]


class ShareSettings(BaseModel):
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


class Changes(Prompts, ShareSettings):
    """What may change of a stream while it runs."""


class StreamConfig(AnalyticsSettings, EventSettings, ShareSettings, Prompts):
    """One stream: where it comes from, what to find in it, and how."""

    name: str | None = setting(
        None,
        "What the stream is called in its records, in topics and in file names; after its source if left out.",
        more="Letters, digits, '.', '_' and '-'.",
        metavar="NAME",
    )
    source: Text = setting(..., "What to watch: a video file, an image, a folder, a live address or a webcam's number.")
    tiles: int = setting(
        1,
        "Divide the image into N x N overlapping tiles as well, for small objects; slower.",
        more="Each tile is as large as an image to the model: 2 finds many more small objects and costs five times the "
        "work. Meant for a GPU, for photos, or where nothing waits for the result.",
        metavar="N",
        ge=1,
        le=8,
    )
    vid_stride: int = setting(
        1,
        "Process every Nth frame of the source only.",
        more="The skipped ones are not in the output either.",
        metavar="N",
        ge=1,
    )
    start: Seconds | None = setting(None, "Where in a file to start: seconds, or 1:30.", metavar="TIME")
    end: Seconds | None = setting(None, "Where in a file to stop: seconds, or 1:30.", metavar="TIME")
    hwaccel: Literal["auto", "cuda", "none"] = setting(
        "auto", "Decode live video on the GPU: auto (if there is one), cuda (insist) or none.", metavar="HOW"
    )
    rtsp_transport: Literal["auto", "tcp", "udp", "multicast", "http"] = setting(
        "auto",
        "How RTSP cameras send: auto, tcp, udp, multicast or http.",
        more="auto is TCP, and UDP where a camera refuses that or sends nothing; it leaves UDP where more than 1 % of "
        "the packets are lost. http is a tunnel through firewalls.",
        metavar="HOW",
    )
    loss: Literal["hide", "show"] = setting(
        "hide",
        "Frames that RTSP packets are missing from: hide or show.",
        more="hide waits for the next key frame, so that the model never sees a broken frame. show is for people who "
        "watch over a bad line: such frames are smeared, and detections on them unreliable.",
        metavar="HOW",
    )
    tls: Text = setting(
        "verify",
        "Certificates accepted from rtsps cameras: verify, accept or sha256:HEX.",
        more="Those of cameras hardly ever match their address. sha256:HEX accepts only the one with this fingerprint, "
        "which the error message shows; accept takes any, and is no protection against interception.",
        metavar="HOW",
    )
    queue: str | None = setting(
        None,
        "Frames waiting for the model: wait, newest or keep N (by itself newest for live sources, wait for files).",
        more="`wait` holds the source back and loses none, which suits a file. `newest` keeps only the newest and "
        "`keep 8` the newest 8; what is dropped is counted, and reported in the record of the next frame.",
        metavar="POLICY",
    )
    in_flight: int = setting(
        2,
        "Frames that the model works on at a time.",
        more="Two keep it busy while results are written.",
        metavar="N",
        ge=1,
        le=64,
    )
    stages: Names = setting(
        [],
        "Stages that results pass on their way to the outputs, in this order.",
        metavar="NAME",
        flags=("--stage",),
    )
    gates: Names = setting(
        [],
        "Gates that must all admit a frame before the model is given it.",
        metavar="NAME",
        flags=("--gate",),
    )

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Every task as its skill and what is asked; also what rules name and nothing else asks for."""
        asked = super().asked
        named = {text for skill, text in asked if skill in ("detect", "point")}
        return [*asked, *(("detect", label) for label in self.rule_labels if label not in named)]

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str | None) -> str | None:
        return None if value is None else check_name(value)

    @field_validator("stages")
    @classmethod
    def _known_stages(cls, value: list[str]) -> list[str]:
        return check_names(value, STAGES)

    @field_validator("gates")
    @classmethod
    def _known_gates(cls, value: list[str]) -> list[str]:
        return check_names(value, GATES)

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

    sinks: list[Text] = setting([], "Where its results go, besides the outputs of all streams.")


class RunConfig(KeepSettings, StreamConfig):
    """Every setting of `saccade run`. Paths are relative to the directory the command is run in."""

    source: Text = setting(
        "",
        StreamConfig.model_fields["source"].description or "",
        more="A video file of any container and codec, an image, or a folder of images. The configurations rtsp and "
        "webrtc-demo are about live sources, which hwaccel and rtsp_transport are for.",
    )
    streams: list[ListedStream] = setting(
        [],
        "Several streams instead of source; each takes from here what it does not set itself.",
        more="Each may have most of the keys of this file for itself; the configuration many-cameras shows it. On the "
        "command line, several SOURCEs.",
    )
    model: Text = setting(
        "nano", "Embedded model, checkpoint folder or hub id; `saccade models` lists them.", metavar="MODEL"
    )
    device: Text = setting(
        "auto", "Where the model runs: auto (the GPU if there is one), cpu, cuda or cuda:N.", metavar="DEVICE"
    )
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = setting(
        None,
        "What the model computes in: float32, bfloat16, float16, or fp8: bfloat16 with weights in FP8.",
        more="By itself float32 on a CPU and for small models, else bfloat16. fp8 is faster on a GPU from Hopper "
        "on, and a little less exact.",
        metavar="DTYPE",
    )
    out: Text | None = setting(
        None,
        "Annotated video to write, an .mp4 file.",
        more="With the source's own timestamps and sound. An existing file is replaced.",
        metavar="FILE",
    )
    jsonl: Text | None = setting(
        None, "Results to write, one JSON record a line and frame; - prints them.", metavar="FILE"
    )
    sinks: list[Text] = setting(
        [],
        "Where else results go: ws://HOST:PORT, mqtt://HOST, https://…, whep:PORT, FILE.mp4, FILE.jsonl.",
        more='"ws://127.0.0.1:8765" serves records to programs and pages, "mqtt://broker" publishes them, '
        '"https://example.org/hook" posts them, "whep:8080" shows the annotated frames in browsers. {stream} in an '
        "address is the stream's name. The configurations rtsp-to-websocket and many-cameras use them.",
        metavar="URL",
        flags=("--sink",),
    )
    display: bool = setting(False, "Show the annotated frames in a window; needs a screen.")
    http: Text | None = setting(
        None,
        "Serve /healthz, /metrics and /streams there.",
        more="/metrics is for Prometheus; /streams lists, adds, removes and changes streams. Any address but 127.0.0.1 "
        "needs a token.",
        metavar="HOST:PORT",
    )
    http_token: Text | None = setting(
        None,
        "What a client of http must send, as `Authorization: Bearer …`; better in the environment.",
        metavar="TOKEN",
        env="SACCADE_TOKEN",
        repr=False,
    )
    http_token_file: Text | None = setting(None, "File that holds the token, instead of http_token.", metavar="FILE")
    http_access: Text | None = setting(
        None,
        "File that says who may do what over http: viewers, operators and admins, each with a token.",
        more="Also by streams, with the headers of a proxy that authenticates people, and with an audit of every "
        "change; pipeline/server/README.md shows one. The token of http_token is an admin's then.",
        metavar="FILE",
    )
    allow_sources: list[Text] = setting(
        [],
        "What POST /streams may open: globs of paths and addresses, and networks, such as 192.168.7.0/24.",
        more="If empty, everything where http is on 127.0.0.1, else nothing. A path counts with its symbolic links "
        "resolved; an address with every redirect, and one whose host is private only if its network, or the host "
        "itself, is listed. Sources that listen on the network must be listed in any case.",
        metavar="ENTRY",
        flags=("--allow-source",),
    )
    http_cert: Text | None = setting(None, "Certificate in PEM format for http, which is https then.", metavar="FILE")
    http_key: Text | None = setting(None, "Key of the certificate, if it is not in the same file.", metavar="FILE")

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
            try:
                check_places(stream.rules, stream)
            except PlacedError as error:
                own = self.streams and "rules" in self.streams[number].model_fields_set
                error.key = ("streams", number, *error.key) if own and error.key else error.key
                raise
        names = [stream.name for stream in self.streams if stream.name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two streams are called '{twice}'")
        return self

    def each(self) -> list[ListedStream]:
        """The streams, each with its own settings and those for all of them."""
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


def flags_of(key: str) -> list[str]:
    """The command-line flags of a setting of `RunConfig`, its usual one first."""
    field = RunConfig.model_fields.get(key)
    extra = field.json_schema_extra if field else None
    flags = extra.get("flags") if isinstance(extra, dict) else None
    return [str(flag) for flag in flags] if isinstance(flags, list) and flags else [f"--{key.replace('_', '-')}"]


def takes_commas(key: str) -> bool:
    """Whether a setting of `RunConfig` is a list that may be written as one text with commas."""
    metadata = RunConfig.model_fields[key].metadata
    return any(isinstance(one, BeforeValidator) and one.func is split_names for one in metadata)
