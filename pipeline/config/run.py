"""All settings of a run: streams, model, outputs and server.

The command-line flags (`cli.options`), the manual (`cli.manual`) and the HTTP API are generated from these settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import BeforeValidator, model_validator

from saccade.pipeline.config.cluster import ClusterSettings
from saccade.pipeline.config.http import HttpSettings
from saccade.pipeline.config.stream import ListedStream, StreamConfig
from saccade.pipeline.config.stream_names import free_name, name_of
from saccade.pipeline.events.settings import KeepSettings, check_places, check_signals
from saccade.pipeline.settings import Address, FileText, PlacedError, Text, setting, split_names

STREAM = "{stream}"
"""Placeholder for the stream's name in the address or path of an output, so that each stream has its own output."""


class RunConfig(HttpSettings, ClusterSettings, KeepSettings, StreamConfig):
    """All settings of `saccade run`. Paths are relative to the current working directory."""

    source: Address = setting(
        "",
        StreamConfig.model_fields["source"].description or "",
        more="Files can have any container and codec; the content decides, not the file name. In a file name, write "
        'a byte that is not valid UTF-8 as in "\\udce9" for E9. The configurations rtsp '
        "and webrtc-demo show live sources.",
    )
    streams: list[ListedStream] = setting(
        [],
        "List of streams, instead of source; each inherits the keys of this file.",
        more="A stream may set most of the keys of this file; the configuration many-cameras shows it. On the "
        "command line, give several SOURCEs.",
    )
    model: FileText = setting(
        "nano",
        "Included model, checkpoint folder or Hugging Face Hub ID; `saccade models` lists the included models.",
        metavar="MODEL",
    )
    device: Text = setting(
        "auto", "Device of the model: auto (the GPU if present), cpu, cuda or cuda:N.", metavar="DEVICE"
    )
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = setting(
        None,
        "Dtype of the model: float32, bfloat16, float16, or fp8 (bfloat16 with FP8 weights).",
        more="Default: float32 on a CPU; on a GPU float16 for small models, otherwise bfloat16. fp8 is faster "
        "on Hopper and "
        "later GPUs, and slightly less accurate.",
        metavar="DTYPE",
    )
    kv_dtype: Literal["fp8"] | None = setting(
        None,
        "fp8 stores the KV cache in FP8, on Ada and later GPUs.",
        more="Default: the model's dtype. fp8 halves the size: GPU memory holds twice as many sequences, and "
        "decode steps of large batches are faster. nano's accuracy does not change.",
        metavar="DTYPE",
    )
    imgsz: int | None = setting(
        None,
        "Longer side of nano's input, in pixels; with more pixels, nano detects smaller objects and takes more time.",
        more="A multiple of 32; default 416. With 640, nano finds more distant faces and persons, and fewer "
        "large objects. A frame takes a third more time on a CPU. Other models have a fixed input size.",
        metavar="PIXELS",
        ge=128,
        le=1280,
        multiple_of=32,
    )
    refiner: FileText | None = setting(
        None,
        "Model that refines segmentation masks: a file, or a Hugging Face Hub ID such as moondream/SegHeadRefiner.",
        more="The refiner makes the outlines of `segment` more accurate. Without a refiner, or if the refiner "
        "fails, records contain the outline of the model. The field `refined` of a record shows which outline it is.",
        metavar="FILE",
    )
    workers: int = setting(
        1,
        "Number of worker processes, each with an engine and a part of the streams; 1 uses a single process.",
        more="Use workers for more streams than one process can run. They need Ray. Workers share the CPUs and "
        "GPUs evenly. "
        "A failed worker restarts, and its streams continue. Outputs and http work as without workers.",
        metavar="N",
        ge=1,
        le=64,
    )
    out: FileText | None = setting(
        None,
        "Output file for the annotated video, an .mp4 file.",
        more="The video has the timestamps and the audio of the source. An existing file is replaced.",
        metavar="FILE",
    )
    jsonl: FileText | None = setting(
        None,
        "Output file for the records, one JSON line per frame; - writes to standard output.",
        more="An existing file is replaced.",
        metavar="FILE",
    )
    sinks: list[FileText] = setting(
        [],
        "More outputs: ws://HOST:PORT, mqtt://HOST, https://…, whep:PORT, FILE.mp4, FILE.jsonl.",
        more='"ws://127.0.0.1:8765" serves records to programs and pages. "mqtt://broker" publishes them. '
        '"https://example.org/hook" posts them. "whep:8080" shows the annotated video in browsers. '
        "{stream} stands for the stream's name. The example configurations rtsp-to-websocket and many-cameras "
        "use such outputs.",
        metavar="URL",
        flags=("--sink",),
    )
    state: Text | None = setting(
        None,
        "File that stores changes made over HTTP; config stores the changes in the configuration file itself.",
        more="Default: FILE.state next to the configuration FILE, or in the working directory if the folder is "
        "read-only. Changes of streams that the command line defines are not stored. Saccade stores a "
        "change before it answers. A later edit of the configuration file overrides it.",
        metavar="FILE|config",
    )
    display: bool = setting(False, "Show the annotated frames in a window; needs a screen.")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.source and self.streams:
            raise ValueError("source and streams are both set: remove one of them")
        if not (self.source or self.streams or self.http):
            raise ValueError("source is missing; give a file, the address of a camera, or http to add streams later")
        for number, stream in enumerate(self.each()):
            if stream.nothing:
                raise ValueError(f"streams[{number}]: {stream.nothing}" if self.streams else stream.nothing)
            try:
                check_places(stream.rules, stream)
                check_signals(stream.rules, stream.source)
            except PlacedError as error:
                own = self.streams and "rules" in self.streams[number].model_fields_set
                error.key = ("streams", number, *error.key) if own and error.key else error.key
                raise
        names = [stream.name for stream in self.streams if stream.name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two streams have the name '{twice}'; use a different name for each")
        return self

    def each(self) -> list[ListedStream]:
        """Return the settings of each stream. Missing settings have the common values of all streams."""
        common = {key: getattr(self, key) for key in StreamConfig.model_fields if key in self.model_fields_set}
        if self.source:
            return [ListedStream.model_validate(common)]
        for key in ("source", "name"):
            common.pop(key, None)
        return [
            stream.model_copy(update={key: common[key] for key in common.keys() - stream.model_fields_set})
            for stream in self.streams
        ]

    def named(self) -> dict[str, ListedStream]:
        """Return all settings of each stream, by name. The name of an unnamed stream is derived from its source."""
        common = self.source or self.model_fields_set & StreamConfig.model_fields.keys()
        if not common and all(stream.name for stream in self.streams):  # the configuration is already resolved
            return {stream.name or "": stream for stream in self.streams}
        streams = self.each() if self.source or self.streams else []
        taken = {stream.name for stream in streams if stream.name}
        named: dict[str, ListedStream] = {}
        for stream in streams:
            name = stream.name
            if name is None:
                name = free_name(name_of(stream.source), taken)
                taken.add(name)
            named[name] = stream if stream.name else stream.model_copy(update={"name": name})
        return named

    def resolved(self) -> RunConfig:
        """Return the configuration with a name and all settings for each stream."""
        return self.with_streams(self.named().values())

    def with_streams(self, streams: Iterable[ListedStream]) -> RunConfig:
        """Return a copy of this configuration with the given streams. Each stream must have a name and all settings."""
        ours = self.model_fields_set - StreamConfig.model_fields.keys()
        values = {key: getattr(self, key) for key in ours | {"streams"}} | {"streams": list(streams)}
        return RunConfig.model_construct(ours | {"streams"}, **values)


def flags_of(key: str) -> list[str]:
    """Return the command-line flags of a setting of `RunConfig`, the preferred flag first."""
    field = RunConfig.model_fields.get(key)
    extra = field.json_schema_extra if field else None
    flags = extra.get("flags") if isinstance(extra, dict) else None
    return [str(flag) for flag in flags] if isinstance(flags, list) and flags else [f"--{key.replace('_', '-')}"]


def takes_commas(key: str) -> bool:
    """Return whether a setting of `RunConfig` is a list that can be given as a comma-separated string."""
    metadata = RunConfig.model_fields[key].metadata
    return any(isinstance(one, BeforeValidator) and one.func is split_names for one in metadata)
