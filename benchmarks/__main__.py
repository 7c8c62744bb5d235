"""Command line `python -m benchmarks …` for developers. Benchmarks for users are in `saccade bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.against.harness import Comparison
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.cli.error_report import guarded
from saccade.pipeline.cli.options import Json, Settings, load_settings, with_settings

bench = typer.Typer(help="Benchmark parts of Saccade.")
against = typer.Typer(help="Compare Saccade with other software; all programs run alternately on this machine.")
bench.add_typer(against, name="against")

Rounds = Annotated[int, typer.Option(min=1, max=1000, help="How often each program runs.")]
Seconds = Annotated[float, typer.Option(min=1, max=600, help="Duration of one round in seconds.")]
Save = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Also write NAME.json and a plot NAME.svg, such as to benchmarks/results."),
]


@bench.command("prompts")
@with_settings("model", "device", "dtype")
def bench_prompts(
    given: Settings,
    prompts: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of prompts on one image to measure.")
    ] = "1,4,8",
    size: Annotated[str, typer.Option(metavar="WxH", help="Size of the image in pixels.")] = "640x360",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Number of repetitions of each measurement.")] = 10,
    as_json: Json = False,
) -> None:
    """Measure the time and memory for several prompts in two cases: all on one image, and each on its own image."""
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
    rows: Annotated[
        str, typer.Option(metavar="N,N,…", help="Batch sizes (sequences per decode step) to measure.")
    ] = "1,8,32",
    keys: Annotated[int, typer.Option(min=2, help="Context length of each sequence, in tokens.")] = 760,
    as_json: Json = False,
) -> None:
    """Compare the GPU time of decode steps with the roofline: the time to read weights and KV cache at full bandwidth.

    The models moondream-2-random and moondream-3-random have random weights and need no weights file. They have the
    dimensions of Moondream 2 and Moondream 3.
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
    frames: Annotated[int, typer.Option(min=2, help="Number of frames of each video.")] = 100,
    objects: Annotated[
        int, typer.Option(min=1, max=20, help="Without CLIP: number of boxes in each predefined answer.")
    ] = 5,
    moved: Annotated[
        str, typer.Option(metavar="N,N,…", help="Without CLIP: numbers of moving boxes to measure.")
    ] = "0,2",
    size: Annotated[str, typer.Option(metavar="WxH", help="Without CLIP: size of the images in pixels.")] = "640x360",
    as_json: Json = False,
) -> None:
    """Count decode steps with and without speculative decoding, on video clips or with predefined answers."""
    from benchmarks.drafts import time_drafts, time_scripted
    from benchmarks.flags import parse_small
    from saccade.pipeline.bench.common import parse_size

    model, device, dtype = given.get("model", "nano"), given.get("device", "auto"), given.get("dtype")
    if clips:
        label = given.get("detect", "person")
        stride = given.get("vid_stride", 1)
        result = time_drafts(model, device, clips, dtype=dtype, label=label, frames=frames, stride=stride)
    else:
        counts = parse_small(moved, "--moved", objects)
        result = time_scripted(model, device, objects, counts, dtype=dtype, size=parse_size(size), frames=frames)
    print(result.as_json() if as_json else result.as_text())


@bench.command("ingest")
@with_settings("rtsp_transport")
def bench_ingest(
    given: Settings,
    source: Annotated[str, typer.Argument(metavar="URL", help="Address of a live stream.")],
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Duration of the measurement in seconds.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Measure the latency from a live stream's sender to the decoded frame, in Saccade and in PyAV at the same time.

    The send time comes from a clock that the sender draws into the frames, or from the sender's RTCP reports.
    """
    from benchmarks.ingest import time_ingest

    result = time_ingest(source, seconds=seconds, transport=given.get("rtsp_transport", "tcp"))
    print(result.as_json() if as_json else result.as_text())


@bench.command("webrtc")
def bench_webrtc(
    codec: Annotated[str, typer.Option(metavar="NAME", help="VP8 or H264.")] = "VP8",
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Duration of the measurement in seconds.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Compare Saccade with aiortc: the latency from a WebRTC sender to the decoded frame, for the same video."""
    from benchmarks.webrtc import time_webrtc

    result = time_webrtc(codec, seconds=seconds)
    print(result.as_json() if as_json else result.as_text())


@bench.command("pipeline")
@with_settings("vid_stride", "detect", "model", "device", "dtype")
def bench_pipeline(
    given: Settings,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Duration of the measurement in seconds.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Measure the latency from a decoded frame to its WebSocket message, without the inference time of the model.

    The demo clip is played at 10 frames/s. If the model is slower, frames are skipped.
    """
    from benchmarks.pipeline import time_pipeline

    settings = load_settings({"source": str(DEMO_CLIP), "detect": "person", **given})
    result = time_pipeline(settings, seconds=seconds)
    print(result.as_json() if as_json else result.as_text())


@bench.command("track")
def bench_track(
    objects: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of objects per frame to measure.")] = "1,10,50",
    frames: Annotated[int, typer.Option(min=10, max=100_000, help="Number of frames to measure.")] = 2000,
    as_json: Json = False,
) -> None:
    """Measure the CPU time per frame of tracking, zones, lines and rules, without a model.

    Simulated objects walk and pass each other. Some detections are missing or have a low score.
    """
    from benchmarks.track import time_tracks
    from saccade.pipeline.bench.common import parse_counts

    result = time_tracks(parse_counts(objects, "--objects"), frames)
    print(result.as_json() if as_json else result.as_text())


@bench.command("mot")
@with_settings("detect", "model", "device", "dtype", "conf", "track_conf")
def bench_mot(
    given: Settings,
    folder: Annotated[
        Path, typer.Argument(help="A sequence of the MOT Challenge, or a folder with several sequences.")
    ],
    detections: Annotated[
        str,
        typer.Option(
            metavar="det|model", help="Boxes to track: det (from det/det.txt) or model (detected by the model)."
        ),
    ] = "det",
    every: Annotated[int, typer.Option(min=1, metavar="N", help="Process every Nth frame only.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the tracks, one NAME.txt per sequence.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score the tracker on MOT Challenge sequences: MOTA, IDF1, HOTA and identity switches.

    Example: python -m benchmarks mot MOT17/train --detections det --out tracks
    """
    settings = load_settings({"detect": "person", **given, "source": str(folder)})
    from benchmarks.mot.scores import evaluate

    start = given.get("track_conf")
    scores = evaluate(folder, settings, detections=detections, every=every, out=out, start=start)
    print(scores.as_json() if as_json else scores.as_text())


@bench.command("saccades")
@with_settings("model", "device", "dtype")
def bench_saccades(
    given: Settings,
    clip: Annotated[
        Path | None, typer.Argument(metavar="CLIP", help="A video file; without CLIP, a synthetic scene is used.")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(metavar="JSON", help="JSON file with the true boxes of the persons in CLIP.")
    ] = None,
    windows: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of windows per frame to measure.")] = "0,1,2",
    seed: Annotated[int | None, typer.Option(help="Random seed for the positions in the synthetic scene.")] = None,
    frames: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of frames.")] = 200,
    as_json: Json = False,
) -> None:
    """Measure how many distant persons are detected with and without zoom windows (crops at full resolution).

    If CLIP is omitted, the input is a synthetic 4K scene with moving and still persons, 60 to 75 pixels tall.
    """
    from benchmarks.flags import parse_small
    from benchmarks.saccades import find_far
    from saccade.engine import Engine
    from saccade.pipeline.errors import ConfigError

    if (clip is None) != (truth is None):
        raise ConfigError("CLIP and --truth need each other: give both, or omit both")
    counts = parse_small(windows, "--windows", 16)
    with Engine.load(given.get("model", "nano"), given.get("device", "auto"), given.get("dtype")) as engine:
        result = find_far(engine, counts, clip=clip, truth=truth, seeds=[seed], frames=frames)
    print(result.as_json() if as_json else result.as_text())


@bench.command("events")
@with_settings("detect", "rtsp_transport", "model", "device", "dtype")
def bench_events(
    given: Settings,
    source: Annotated[str, typer.Argument(metavar="URL", help="Address of a live stream in which someone moves.")],
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Duration of the measurement in seconds.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Measure the time from the capture of a frame until a WebSocket client is notified that an event has started.

    The image is divided into zones, so that a moving object starts many events. Events and clips are stored in a
    temporary folder.
    """
    from benchmarks.events import time_events

    result = time_events({"detect": "person", **given, "source": source}, seconds=seconds)
    print(result.as_json() if as_json else result.as_text())


@bench.command("questions")
@with_settings("model", "device", "dtype", "kv_dtype")
def bench_questions(
    given: Settings,
    streams: Annotated[int, typer.Option(min=4, max=1024, help="Number of cameras.")] = 64,
    fps: Annotated[str, typer.Option(metavar="A-B", help="Frame rates of the slowest and fastest camera.")] = "5-30",
    questions: Annotated[float, typer.Option(min=0.1, max=1000, help="Questions per second.")] = 8.0,
    seconds: Annotated[
        float,
        typer.Option(min=1, max=600, help="Duration of each measurement, without and with questions, in seconds."),
    ] = 20.0,
    objects: Annotated[int | None, typer.Option(min=1, max=50, help="Number of objects in every answer.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how much rules that ask the model questions slow down the detections of simulated cameras.

    The model must support questions, such as --model moondream-2-random.
    """
    from benchmarks.questions import time_questions
    from saccade.pipeline.bench.common import parse_range

    result = time_questions(
        given.get("model", "nano"),
        given.get("device", "auto"),
        streams,
        parse_range(fps, "--fps"),
        questions,
        dtype=given.get("dtype"),
        kv_dtype=given.get("kv_dtype"),
        seconds=seconds,
        objects=objects,
    )
    print(result.as_json() if as_json else result.as_text())


@bench.command("soak")
def bench_soak(
    clip: Annotated[str, typer.Argument(metavar="CLIP", help="Video that the simulated cameras play in a loop.")],
    streams: Annotated[int, typer.Option(min=1, max=64, help="Number of simulated cameras.")] = 8,
    fps: Annotated[float, typer.Option(min=0.5, max=60, help="Frame rate of each camera.")] = 3.0,
    minutes: Annotated[float, typer.Option(min=1, max=10_000, help="Duration of the test in minutes.")] = 30.0,
    segment: Annotated[int, typer.Option(min=2, max=3600, help="Length of a recording segment in seconds.")] = 60,
    faults: Annotated[
        bool,
        typer.Option(help="Inject faults: failing cameras and receivers, and clients that connect and disconnect."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Random seed of the faults.")] = 1,
    folder: Annotated[str | None, typer.Option(help="Output folder; the default is a temporary folder.")] = None,
    trace: Annotated[
        bool, typer.Option(help="Show the memory that Python has allocated since minute 10; slow.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a soak test with simulated cameras, recordings, clients and servers. Print the resource usage every minute.

    At the end, print the growth of each value per minute, with its 95 % confidence interval.
    """
    from benchmarks.soak.run import Soak, run_soak

    result = run_soak(Soak(clip, streams, fps, minutes, segment, faults, seed, folder, trace))
    print(result.as_json() if as_json else result.as_text())


@against.command("onnxruntime")
def against_onnxruntime(
    rounds: Rounds = 9,
    frames: Annotated[int, typer.Option(min=1, max=100_000, help="Images per round.")] = 30,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Number of threads of each program.")] = 1,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Compare Saccade with onnxruntime: the CPU inference time of the nano model's detector."""
    from benchmarks.against.onnx_runtime import compare

    _show(compare(rounds, frames, threads), save, as_json)


@against.command("readers")
def against_readers(rounds: Rounds = 5, seconds: Seconds = 8.0, save: Save = None, as_json: Json = False) -> None:
    """Compare the time to decode a 1080p H.264 file with Saccade, PyAV and OpenCV. For live streams, see `ingest`."""
    from benchmarks.against.readers import compare

    _show(compare(rounds, seconds), save, as_json)


@against.command("aiortc")
def against_aiortc(rounds: Rounds = 3, seconds: Seconds = 10.0, save: Save = None, as_json: Json = False) -> None:
    """Compare the latency from a WebRTC sender to the decoded frame in Saccade and in unmodified aiortc."""
    from benchmarks.against.aiortc import compare

    _show(compare(rounds, seconds), save, as_json)


@against.command("bytetrack")
def against_bytetrack(
    rounds: Rounds = 5,
    frames: Annotated[int, typer.Option(min=10, max=100_000, help="Simulated frames per round.")] = 1000,
    objects: Annotated[int, typer.Option(min=1, max=1000, help="Simulated objects per frame.")] = 10,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Compare Saccade's tracker with ByteTrack from the Python package `trackers`: speed and accuracy."""
    from benchmarks.against.tracking import compare_trackers

    _show(compare_trackers(rounds, frames, objects), save, as_json)


@against.command("mot-scores")
def against_mot_scores(rounds: Rounds = 5, save: Save = None, as_json: Json = False) -> None:
    """Compare the scores that Saccade and the Python package `trackers` give to the same tracks, and the CPU time."""
    from benchmarks.against.tracking import compare_scoring

    _show(compare_scoring(rounds), save, as_json)


@against.command("reference")
@with_settings("model", "device", "dtype")
def against_reference(
    given: Settings,
    objects: Annotated[int, typer.Option(min=1, max=50, help="Number of objects in every answer.")] = 5,
    rounds: Rounds = 5,
    frames: Annotated[int, typer.Option(min=1, max=100_000, help="Images per round.")] = 20,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Compare the inference time of the engine and of the reference implementation of Moondream 2.

    The default model, moondream-2-random, needs a GPU.
    """
    from benchmarks.against.reference import compare

    model = given.get("model", "moondream-2-random")
    _show(compare(model, given.get("device", "auto"), given.get("dtype"), objects, rounds, frames), save, as_json)


@against.command("one-queue")
@with_settings("model", "device")
def against_one_queue(
    given: Settings,
    cameras: Annotated[int, typer.Option(min=2, max=1024, help="Number of simulated cameras.")] = 16,
    rounds: Rounds = 5,
    seconds: Seconds = 8.0,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Compare Saccade's scheduling with a single FIFO queue, while simulated cameras overload the engine."""
    from benchmarks.against.cameras import compare

    _show(compare(given.get("model", "nano"), given.get("device", "auto"), cameras, rounds, seconds), save, as_json)


@against.command("vllm")
def against_vllm(
    rounds: Rounds = 1,
    configs: Annotated[
        str, typer.Option(metavar="NAME,…", help="Configurations to compare: bf16, bf16-fa3 (FlashAttention 3), fp8.")
    ] = "bf16,bf16-fa3,fp8",
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="Number of images per latency measurement.")] = 60,
    images: Annotated[int, typer.Option(min=32, max=10_000, help="Number of images per throughput measurement.")] = 128,
    limit: Annotated[float, typer.Option(min=60, help="Time limit of a program in seconds.")] = 600.0,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Compare Saccade and vLLM on a model with random weights and the dimensions of Moondream 3. Needs a GPU and vLLM.

    Each result is printed to stderr immediately.
    """
    from benchmarks.against.vllm import compare

    _show(compare(rounds, configs.split(","), requests, images, limit), save, as_json)


@against.command("plot")
def against_plot(
    results: Annotated[list[Path], typer.Argument(metavar="JSON…", help="JSON files that were written with --save.")],
) -> None:
    """Redraw the plots of saved comparisons, next to their JSON files."""
    for path in results:
        path.with_suffix(".svg").write_text(Comparison.read(path).as_svg(), encoding="utf-8")


def _show(result: Comparison, save: Path | None, as_json: bool) -> None:
    if save is not None:
        result.save(save)
    print(result.as_json() if as_json else result.as_text())


if __name__ == "__main__":
    sys.exit(guarded(lambda: int(bench(standalone_mode=False, prog_name="python -m benchmarks") or 0)))
