"""The command `saccade demo`: serves the demo page until a signal stops it, and shows the state of the streams."""

from __future__ import annotations

import secrets
import sys
import webbrowser

from saccade.pipeline.api.demo import Demo
from saccade.pipeline.cli.formatting import show_preparation
from saccade.pipeline.cli.live_view import follow
from saccade.pipeline.cli.signals import EndingSignals
from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.http import tls_of, token_of
from saccade.pipeline.runtime.stream import load_engine
from saccade.web.tls import self_signed
from saccade.web.tokens import is_loopback


def run_demo(config: RunConfig, host: str, port: int, *, self_sign: bool = False, browser: bool, quiet: bool) -> None:
    """Serve the demo page until a signal stops it, and show the state of the streams.

    Args:
        config: model, initial prompts, initial streams and token.
        host: address to listen on. For a public address without a token, a token is generated.
        port: port to listen on; 0 for any free port.
        self_sign: whether to serve TLS with a self-signed certificate if the configuration has no certificate.
        browser: whether to open the page in a browser if standard output is a terminal.
        quiet: whether to print only the URL of the page.

    Raises:
        ConfigError, SourceError, EngineError, StreamError: if the configuration, a source, the model or a stream cannot
            be used.
    """
    chosen = token_of(config.http_token, config.http_token_file)
    token = chosen or (None if is_loopback(host) else secrets.token_urlsafe(12))
    tls = tls_of(config.http_cert, config.http_key) or (self_signed(host) if self_sign else None)
    with (
        EndingSignals() as signals,
        load_engine(config, show_preparation) as engine,
        Demo(
            engine, config, host, port, token, tls=tls, base=as_cameras(config), allow_sources=config.allow_sources
        ) as demo,
    ):
        demo.controller.start()
        # A token that the user chose is not printed, because output may be logged.
        shown = "" if token is None else f"?token={token if chosen is None else '…'}"
        print(f"saccade: open {demo.url}{shown}  (Ctrl-C stops it)", flush=True)
        if browser and sys.stdout.isatty():
            webbrowser.open(f"{demo.url}{f'?token={token}' if token else ''}")
        follow(demo.controller, signals, quiet=quiet)


def as_cameras(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration in which all video files play endlessly, like cameras."""
    resolved = config.resolved()
    return resolved.with_streams(stream.model_copy(update={"loop": True}) for stream in resolved.streams)
