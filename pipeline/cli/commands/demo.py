"""`saccade demo`: serves the demo page from the terminal until it is ended, and shows how its streams are doing."""

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
    """Serve the page until a signal ends it, and show how its streams are doing.

    Args:
        config: the model, the prompts at first, the streams to start with, and a token or none.
        host: address to listen on; where other machines can reach it and there is no token, one is made.
        port: the port; 0 for any that is free.
        self_sign: serve over TLS with a certificate made for this, if the configuration names none.
        browser: open the page in a browser if standard output is a terminal.
        quiet: print only the address.

    Raises:
        ConfigError, SourceError, EngineError, StreamError: if something cannot be used.
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
        # A token that the user chose is not repeated, since what is printed may be kept.
        shown = "" if token is None else f"?token={token if chosen is None else '…'}"
        print(f"saccade: open {demo.url}{shown}  (Ctrl-C ends it)", flush=True)
        if browser and sys.stdout.isatty():
            webbrowser.open(f"{demo.url}{f'?token={token}' if token else ''}")
        follow(demo.controller, signals, quiet=quiet)


def as_cameras(config: RunConfig) -> RunConfig:
    """The configuration with its files played over and over, as if they were cameras."""
    resolved = config.resolved()
    return resolved.with_streams(stream.model_copy(update={"loop": True}) for stream in resolved.streams)
