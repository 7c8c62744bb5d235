"""`python -m benchmarks …`: what developers time. What a user asks of a machine is `saccade bench`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from saccade.pipeline.cli.error_report import guarded
from saccade.pipeline.cli.options import Json, Settings, with_settings

bench = typer.Typer(help="Time parts of the engine.")


@bench.command("prompts")
@with_settings("model", "device", "dtype")
def bench_prompts(
    given: Settings,
    prompts: Annotated[str, typer.Option(metavar="N,N,…", help="Prompts on one image: one row each.")] = "1,4,8",
    size: Annotated[str, typer.Option(metavar="WxH", help="Size of the image in pixels.")] = "640x360",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often to measure each row.")] = 10,
    as_json: Json = False,
) -> None:
    """Measure what several prompts on one image cost, beside the same prompts on an image each."""
    from benchmarks.prompts import time_prompts
    from saccade.pipeline.bench.common import parse_counts, parse_size

    counts, pixels = parse_counts(prompts, "--prompts"), parse_size(size)
    result = time_prompts(
        given.get("model", "nano"),
        given.get("device", "auto"),
        counts,
        dtype=given.get("dtype"),
        size=pixels,
        rounds=rounds,
    )
    print(result.as_json() if as_json else result.as_text())


@bench.command("decode")
@with_settings("model", "device", "dtype", "kv_dtype")
def bench_decode(
    given: Settings,
    rows: Annotated[str, typer.Option(metavar="N,N,…", help="Sequences in a step: one row each.")] = "1,8,32",
    keys: Annotated[int, typer.Option(min=2, help="Keys of each sequence.")] = 760,
    as_json: Json = False,
) -> None:
    """Time decode steps by the GPU's clock, beside the time to read their bytes once.

    Needs no weights with --model moondream-2-random or moondream-3-random: the published dimensions, random numbers.
    """
    from benchmarks.decode import time_decode
    from saccade.pipeline.bench.common import parse_counts

    result = time_decode(
        given.get("model", "nano"),
        given.get("device", "auto"),
        parse_counts(rows, "--rows"),
        dtype=given.get("dtype"),
        kv_dtype=given.get("kv_dtype"),
        length=keys,
    )
    print(result.as_json() if as_json else result.as_text())


@bench.command("drafts")
@with_settings("vid_stride", "detect", "model", "device", "dtype")
def bench_drafts(
    given: Settings,
    clips: Annotated[list[str] | None, typer.Argument(metavar="CLIP…", help="Video files.")] = None,
    frames: Annotated[int, typer.Option(min=2, help="How many frames of each.")] = 100,
    objects: Annotated[int, typer.Option(min=1, max=20, help="Without a CLIP: boxes of each scripted answer.")] = 5,
    moved: Annotated[str, typer.Option(metavar="N,N,…", help="Without a CLIP: how many of them move.")] = "0,2",
    size: Annotated[str, typer.Option(metavar="WxH", help="Without a CLIP: size of the images in pixels.")] = "640x360",
    as_json: Json = False,
) -> None:
    """Count decode steps with and without the last frame's answer as a draft, on clips or with scripted answers."""
    from benchmarks.drafts import time_drafts, time_scripted
    from saccade.pipeline.bench.common import parse_size, parse_small

    model, device, dtype = given.get("model", "nano"), given.get("device", "auto"), given.get("dtype")
    if clips:
        label = given.get("detect", "person")
        stride = given.get("vid_stride", 1)
        result = time_drafts(model, device, clips, dtype=dtype, label=label, frames=frames, stride=stride)
    else:
        counts = parse_small(moved, "--moved", objects)
        result = time_scripted(model, device, objects, counts, dtype=dtype, size=parse_size(size), frames=frames)
    print(result.as_json() if as_json else result.as_text())


if __name__ == "__main__":
    sys.exit(guarded(lambda: int(bench(standalone_mode=False, prog_name="python -m benchmarks") or 0)))
