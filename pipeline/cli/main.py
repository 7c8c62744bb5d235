"""The commands of `saccade`. Each command imports slow modules only when it runs."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from saccade.distribution import VERSION
from saccade.pipeline.cli.app import App
from saccade.pipeline.cli.bench import bench
from saccade.pipeline.cli.config import config_commands
from saccade.pipeline.cli.error_report import FAILED, guarded
from saccade.pipeline.cli.events import add_event_commands
from saccade.pipeline.cli.options import (
    Json,
    Quiet,
    Settings,
    help_of,
    load_settings,
    settings_in,
    sources_in,
    with_settings,
)
from saccade.pipeline.cli.sections import sections
from saccade.pipeline.cli.terminal import prepare_terminal
from saccade.pipeline.errors import ConfigError, RunFailed

_PANELS = {
    key: heading.capitalize()
    for heading, keys in sections().items()
    for key in keys
    if key not in ("source", "streams")
}

app = App(
    help="Real-time video analytics with a vision-language model: detects objects in video and answers questions.",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.add_typer(config_commands, name="config")


def main() -> None:
    """Run the command line and exit. Exit codes: 0 success, 1 failure during the run, 2 invalid input, 130 interrupted.

    After SIGTERM, the exit code is 0.
    """
    # Must be set before torch is loaded. Threads that spin while they wait take cores from decoders, encoders and the
    # engine's loop: next to other work on two cores, a frame took 139 ms with spinning and 67 ms without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from saccade.engine.process import limit_arenas  # imported here, because the import reads OMP_WAIT_POLICY

    limit_arenas()
    prepare_terminal()
    sys.exit(guarded(lambda: app(standalone_mode=False) or 0))


@app.callback()
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """With `--version`, print the version. Without a command, print the help."""
    if version:
        print(f"saccade {VERSION}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        try:
            os.getcwd()
        except OSError:
            raise ConfigError("the working directory no longer exists: change to an existing directory") from None


@app.command()
@with_settings(*_PANELS, panels=_PANELS)
def run(
    given: Settings,
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help=f"{help_of('source')} Each source is a separate stream."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML configuration file; flags override it.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of the engine's steps, a .json file for ui.perfetto.dev."),
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Detect objects in every frame of a video, and write the results.

    saccade run street.mp4 --detect person --detect car --out found.mp4 --jsonl found.jsonl
    """
    settings = load_settings({**sources_in(source), **given}, config)
    from saccade.pipeline.cli.formatting import show_preparation, summary
    from saccade.pipeline.cli.live_view import follow
    from saccade.pipeline.cli.signals import EndingSignals
    from saccade.pipeline.cli.trace_file import check_file, traced
    from saccade.pipeline.control.config_file import ConfigFile
    from saccade.pipeline.run import has_workers, opened_run
    from saccade.pipeline.runtime.targets import shown_targets

    check_file(trace)
    file = ConfigFile(config, {**sources_in(source), **given}) if config else None
    workers = has_workers(settings)
    if workers and trace is not None:
        raise ConfigError(
            f"--trace: a trace can cover only one engine; remove {'--ray' if settings.ray else '--workers'}"
        )
    with EndingSignals() as signals:
        if workers:
            signals.catch()  # before Ray starts, because Ray must end with this command
        try:
            with (
                opened_run(settings, file, show_preparation, given_up=lambda: bool(signals)) as opened,
                traced(opened.controller.local.engine, trace) if trace else nullcontext(),
            ):
                if file and not sys.stdin.isatty():  # on a terminal, SIGHUP means that the terminal was closed
                    signals.reload_on_hangup()
                if opened.url and not quiet:
                    print(f"saccade: HTTP server at {opened.url}  (Ctrl-C stops it)", file=sys.stderr, flush=True)
                if not signals:
                    follow(opened.controller, signals, quiet=quiet)
        except SystemExit:  # while Ray was starting
            if not signals:
                raise
            return signals.exit_code
    ended = opened.controller.finished
    finished = {name: ended[name] for name in opened.controller.config.named() if name in ended}
    failed = [one.error for one in finished.values() if one.error]
    if failed and len(finished) == 1:
        raise RunFailed from failed[0]
    if not quiet:
        targets = shown_targets(settings)
        # Standard output holds only records.
        stream = sys.stderr if "-" in targets else sys.stdout
        for name, one in finished.items():
            named = f"{name}: " if len(finished) > 1 else ""
            print(named + summary(one.status.report), file=stream)
        for target in targets:
            if target != "-":
                print(f"→ {target}", file=stream)
    files = [one.status for one in finished.values() if not one.status.live]
    damaged = [status for status in files if status.report.corrupt_packets]
    for status in damaged:
        count = status.report.corrupt_packets
        print(f"saccade: {status.source} is damaged: {count} packets skipped", file=sys.stderr)
    return FAILED if failed or damaged else signals.exit_code


@app.command()
@with_settings("detect", "point", "model", "device", "dtype", "conf", "allow_sources")
def demo(
    given: Settings,
    source: Annotated[
        list[str] | None, typer.Option(help="Stream to show: a camera, or a file that is played in a loop; repeatable.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any address except 127.0.0.1 needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")] = 8080,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="SACCADE_TOKEN",
            help="Token for the web console; the default is a generated token if a token is required.",
        ),
    ] = None,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="File that contains the token.")] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Serve https. Without --cert, the certificate is self-signed.")
    ] = False,
    cert: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate in PEM format, for https.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Private key of the certificate in PEM format, if the key is in another file."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    quiet: Quiet = False,
) -> int:
    """Open the web console with a camera, the demo clip, a video file or a running stream.

    saccade demo --source rtsp://192.0.2.7/stream --detect person
    """
    from saccade.pipeline.cli.commands.demo import run_demo

    if not given.keys() & {"detect", "point"}:
        given["detect"] = "person"
    access = {"http_token": token, "http_token_file": token_file, "http_cert": cert, "http_key": key}
    settings = load_settings({**sources_in(source), **given, **settings_in(access), "http": f"{host}:{port}"})
    run_demo(settings, host, port, self_sign=tls, browser=browser, quiet=quiet)
    return 0


@app.command()
@with_settings(
    "detect",
    "point",
    "segment",
    "polygons",
    "query",
    "task",
    "model",
    "device",
    "dtype",
    "kv_dtype",
    "imgsz",
    "refiner",
    "conf",
    "max_objects",
    "tiles",
)
def image(
    given: Settings,
    source: Annotated[str, typer.Argument(metavar="PHOTO", help="An image file.")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Output file for the annotated image, such as found.png.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Detect objects in one image, and print or draw the result.

    saccade image street.jpg --detect person --out found.png
    """
    settings = load_settings({**given, "source": source, **({"out": out} if out else {})})
    from saccade.pipeline.cli.commands.image import process_image

    processed = process_image(settings)
    if settings.out:
        processed.save(settings.out)
    print(processed.as_json() if as_json else processed.as_text())


@app.command()
@with_settings("hwaccel", "rtsp_transport", "tls")
def probe(
    given: Settings,
    source: Annotated[str, typer.Argument(metavar="URL", help="Source: an address, a file or the number of a webcam.")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Output file for an image of the source, such as seen.jpg.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to receive a live source.")] = 3.0,
    as_json: Json = False,
) -> None:
    """Open a video source, and report codec, size, frame rate, latency and packet loss.

    saccade probe rtsp://user:password@camera/stream --out seen.jpg
    """
    from saccade.pipeline.cli.commands.probe import examine

    hwaccel, transport = given.get("hwaccel", "auto"), given.get("rtsp_transport", "auto")
    tls = given.get("tls", "verify")
    probed = examine(source, seconds=seconds, hwaccel=hwaccel, transport=transport, tls=tls, out=out)
    print(probed.as_json() if as_json else probed.as_text())


@app.command()
def discover(
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds to wait for replies of cameras.")] = 3.0,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="User name of the cameras, to list their video streams.")
    ] = None,
    password: Annotated[
        str | None, typer.Option(metavar="TEXT", envvar="SACCADE_ONVIF_PASSWORD", help="Password of the cameras.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the ONVIF cameras on the network. With --user, also list their video streams.

    saccade discover --user admin
    """
    from saccade.pipeline.cli.commands.discover import find_cameras

    found = find_cameras(seconds, user, password)
    print(found.as_json() if as_json else found.as_text())


@app.command()
def mcp(
    url: Annotated[
        str, typer.Option(metavar="URL", help="Address of the HTTP API of a running Saccade (--http).")
    ] = "http://127.0.0.1:8080",
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve over HTTP at this address instead of standard input and output."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="SACCADE_TOKEN",
            help="Token of the API. HTTP clients of this server must send it, too.",
        ),
    ] = None,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="File that contains the token.")] = None,
) -> None:
    """Give AI assistants access to the streams of a running Saccade (Model Context Protocol).

    saccade mcp --url http://127.0.0.1:8080
    """
    from saccade.pipeline.cli.mcp.serve import serve

    serve(url, token, token_file, http)


@app.command()
def models() -> None:
    """List the included models. `--model` also accepts a checkpoint folder or a Hugging Face Hub ID."""
    from saccade.engine import EMBEDDED

    for entry in EMBEDDED:
        print(f"{entry.name:<10} {entry.about}")


@app.command()
def configs(
    name: Annotated[str | None, typer.Argument(help="Configuration to print; without it, list all.")] = None,
) -> None:
    """List the example configurations, or print one.

    saccade configs rtsp > camera.yaml
    """
    from saccade.pipeline.cli.commands.configs import list_configs, read_config

    if name is None:
        for known, about in list_configs().items():
            print(f"{known:<18} {about}")
    else:
        print(read_config(name), end="")


@app.command()
@with_settings("device")
def golden(
    given: Settings,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a model and its expected answers.")],
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="float32, bfloat16, float16 or fp8. Only float32 answers must be equal."),
    ] = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0, help="Maximum difference of embeddings and logits (default: 1e-4 in float32, else unlimited)."
        ),
    ] = None,
) -> int:
    """Compare the engine's results with the results of a reference implementation.

    In float32, the exit code is 1 if the results differ. In other dtypes, the differences are only listed.
    """
    from saccade.engine.golden.check import check, require_folder
    from saccade.pipeline.cli.formatting import golden_table

    quantities = check(require_folder(folder), given.get("device", "cpu"), dtype, tolerance)
    print(golden_table(quantities))
    return 0 if quantities and all(quantity.ok for quantity in quantities) else FAILED


@app.command()
def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Compare each GPU's results with the CPU's.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Check this checkpoint: model family, and inputs of the heads for box coordinates."
        ),
    ] = None,
    refiner: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --model: check whether this mask refiner fits the model."),
    ] = None,
) -> int:
    """List installed packages, devices and codecs, and report missing components."""
    from saccade.pipeline.cli.commands.doctor import report

    return FAILED if report(gpu, model, refiner) else 0


add_event_commands(app)  # last, because the help lists commands in this order
