"""The benchmark commands `saccade bench …`. Each command imports slow modules only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.cli.app import App
from saccade.pipeline.cli.options import Json, Settings, load_settings, with_settings

Objects = Annotated[
    int | None,
    typer.Option(min=1, max=50, help="Number of objects in every answer (default: the model decides)."),
]

Windows = Annotated[
    int,
    typer.Option(
        min=0,
        max=16,
        metavar="N",
        help="Number of windows in native resolution per image, at random positions (see `saccade run --saccades`).",
    ),
]

bench = App(help="Benchmark Saccade on this machine.")


@bench.callback()
def bench_root() -> None:
    """Benchmark Saccade on this machine."""


@bench.command("frame")
@with_settings("detect", "tiles", "model", "device", "dtype", "kv_dtype", "imgsz")
def bench_frame(
    given: Settings,
    size: Annotated[str, typer.Option(metavar="WxH", help="Size of the images in pixels.")] = "640x360",
    frames: Annotated[int, typer.Option(min=1, help="Number of images.")] = 200,
    objects: Objects = None,
    as_json: Json = False,
) -> None:
    """Measure the latency of detection in single images: median and 99th percentile.

    The images are scaled frames of the demo clip.
    """
    from saccade.pipeline.bench.common import parse_size
    from saccade.pipeline.bench.frame import time_frames

    width, height = parse_size(size)
    settings = load_settings({"source": str(DEMO_CLIP), "detect": "person", **given})
    result = time_frames(settings, width, height, frames, objects)
    print(result.as_json() if as_json else result.as_text())


@bench.command("bubble")
@with_settings("model", "device", "dtype")
def bench_bubble(
    given: Settings,
    streams: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of streams to measure.")] = "1,8,32",
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Seconds per measurement.")] = 10,
    objects: Annotated[float, typer.Option(min=0, max=50, help="Mean number of objects per answer.")] = 5.0,
    size: Annotated[str, typer.Option(metavar="WxH", help="Size of the images in pixels.")] = "640x360",
    as_json: Json = False,
) -> None:
    """Measure the speedup of a pipelined engine over a blocking engine.

    A pipelined engine prepares each decode step while the device computes the previous step.

    The models moondream-2-random and moondream-3-random have random weights and need no download.
    """
    from saccade.pipeline.bench.bubble import time_bubble
    from saccade.pipeline.bench.common import parse_counts, parse_size

    counts, pixels = parse_counts(streams, "--streams"), parse_size(size)
    result = time_bubble(
        given.get("model", "nano"),
        given.get("device", "auto"),
        counts,
        dtype=given.get("dtype"),
        seconds=seconds,
        objects=objects,
        size=pixels,
    )
    print(result.as_json() if as_json else result.as_text())


@bench.command("throughput")
@with_settings("model", "device", "dtype", "kv_dtype")
def bench_throughput(
    given: Settings,
    streams: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of streams to measure.")] = "8,32",
    objects: Objects = None,
    size: Annotated[str, typer.Option(metavar="WxH", help="Size of the images in pixels.")] = "640x360",
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Seconds per measurement.")] = 5.0,
    saccades: Windows = 0,
    as_json: Json = False,
) -> None:
    """Measure the throughput (images per second) and the CPU time with many concurrent streams."""
    from saccade.pipeline.bench.common import parse_counts, parse_size
    from saccade.pipeline.bench.throughput import time_throughput

    counts, pixels = parse_counts(streams, "--streams"), parse_size(size)
    result = time_throughput(
        given.get("model", "nano"),
        given.get("device", "auto"),
        counts,
        dtype=given.get("dtype"),
        kv_dtype=given.get("kv_dtype"),
        objects=objects,
        size=pixels,
        seconds=seconds,
        saccades=saccades,
    )
    print(result.as_json() if as_json else result.as_text())


@bench.command("cameras")
@with_settings("model", "device", "dtype", "kv_dtype")
def bench_cameras(
    given: Settings,
    streams: Annotated[int, typer.Option(min=4, max=1024, help="Number of cameras.")] = 64,
    fps: Annotated[
        str, typer.Option(metavar="A-B", help="Frame rates of the slowest and the fastest camera, in fps.")
    ] = "5-30",
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Seconds to run.")] = 20.0,
    deadline_ms: Annotated[
        float, typer.Option(min=0, help="Maximum latency of a result, in milliseconds; 0 for no limit.")
    ] = 250.0,
    load: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Frame rate of all cameras together, as a multiple of the model's throughput; overrides --fps.",
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="W,W,…", help="Scheduling weights of the cameras, in the order of the cameras.")
    ] = "1",
    objects: Objects = None,
    size: Annotated[str, typer.Option(metavar="WxH", help="Size of the images in pixels.")] = "640x360",
    saccades: Windows = 0,
    as_json: Json = False,
) -> None:
    """Simulate cameras that overload the model, and measure latency, dropped frames and fairness.

    One camera freezes, one sends bursts of frames, and one has 4K resolution.
    """
    from saccade.pipeline.bench.cameras.measure import time_cameras
    from saccade.pipeline.bench.common import parse_range, parse_size, parse_weights

    result = time_cameras(
        given.get("model", "nano"),
        given.get("device", "auto"),
        streams,
        parse_range(fps, "--fps"),
        dtype=given.get("dtype"),
        kv_dtype=given.get("kv_dtype"),
        seconds=seconds,
        deadline_ms=deadline_ms or None,
        load=load,
        weights=parse_weights(weights, "--weights"),
        objects=objects,
        size=parse_size(size),
        saccades=saccades,
    )
    print(result.as_json() if as_json else result.as_text())
