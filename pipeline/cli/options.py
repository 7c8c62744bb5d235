"""What several commands take, and how that becomes a configuration. Imports nothing that is slow to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from saccade.pipeline.core.config import RunConfig

Detect = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Name to find as boxes; again or with commas for more.")
]
Classes = Annotated[str | None, typer.Option(metavar="NAMES", help="The same as --detect, with commas.")]
Point = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Name to find as points; again or with commas for more.")
]
Query = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Question to answer in text; again for more.")]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Name, checkpoint folder or hub id (default nano).")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default auto).")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16, float16, or fp8: bfloat16 with weights in FP8 (default float32 on a CPU and for small "
        "models, else bfloat16).",
    ),
]
Conf = Annotated[float | None, typer.Option(help="Least score of a box or point, 0 to 1 (default 0.5).")]
Tiles = Annotated[int | None, typer.Option(metavar="N", help="Look at N x N parts as well, for small objects.")]
VidStride = Annotated[int | None, typer.Option(metavar="N", help="Look at every Nth frame (default 1).")]
MaxObjects = Annotated[int | None, typer.Option(help="Most objects for one name in one frame (default 50).")]
HwAccel = Annotated[str | None, typer.Option(metavar="HOW", help="Decode live video by auto, cuda or none.")]
RtspTransport = Annotated[str | None, typer.Option(metavar="HOW", help="RTSP over tcp (default) or udp.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def settings_of(context: typer.Context, config: Path | None = None) -> RunConfig:
    """The configuration of a command: its file, if it has one, and its flags.

    Raises:
        ConfigError: if a value is not what it should be.
    """
    from saccade.pipeline.core.config import load

    return load(config, given(context))


def given(context: typer.Context) -> dict[str, object]:
    """The flags of this command that are configuration keys and were given; `--classes` goes into `detect`."""
    from saccade.pipeline.core.config import RunConfig

    values = dict(context.params)
    values["sinks"] = values.get("sink")
    if isinstance(sources := values.get("source"), list | tuple):
        values["source"] = sources[0] if len(sources) == 1 else None
        values["streams"] = [{"source": source} for source in sources] if len(sources) > 1 else None
    names = [*(values.get("detect") or []), *filter(None, [values.get("classes")])]
    values["detect"] = ",".join(names) if names else None
    values["point"] = ",".join(values.get("point") or []) or None
    return {key: values[key] for key in RunConfig.model_fields if values.get(key) not in (None, [], ())}
