"""Opens and closes the parts of `saccade run`: the source, the model, the outputs and the HTTP server."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.distribution import install_command
from saccade.pipeline.config import RunConfig, parse_place
from saccade.pipeline.config.http import check_open, tls_of, token_of
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import opened_local
from saccade.pipeline.control.plan import merge, plan
from saccade.pipeline.control.source_policy import SourcePolicy
from saccade.pipeline.control.state import StateFile
from saccade.pipeline.errors import ConfigError
from saccade.web.tokens import is_loopback

if TYPE_CHECKING:
    from saccade.pipeline.api.http_server import HttpServer

log = logging.getLogger(__name__)

_IN_FILE = "config"


@dataclass(slots=True, frozen=True)
class OpenedRun:
    """An opened run whose streams have not been started.

    Attributes:
        controller: starts, changes and stops the streams.
        server: HTTP server; None if the configuration has no `http`.
    """

    controller: Controller
    server: HttpServer | None

    @property
    def url(self) -> str | None:
        """The URL of the HTTP server. None if no server is configured."""
        return None if self.server is None else self.server.url


@contextmanager
def opened_run(
    config: RunConfig,
    file: ConfigFile | None = None,
    progress: Callable[[int, int], None] | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> Iterator[OpenedRun]:
    """Open sources, model, outputs and server without starting the streams.

    Close everything when the `with` block ends.

    With workers, each worker opens its sources when the run starts.

    Args:
        config: the configuration.
        file: configuration file, or None. Stored changes of an earlier run are applied to the configuration.
        progress: progress callback (steps done, total steps) for the preparation of a GPU.
        given_up: returns True to stop waiting for workers.

    Raises:
        ConfigError: if an output would overwrite a source or another output, the model does not support a task, or Ray
            is missing or has no resources for the workers.
        SourceError, EngineError, SinkError: if a source, the model or an output cannot be used.
        RunFailed: if closing an output fails at the end of the run.
    """
    place = parse_place(config.http) if config.http else None
    token = token_of(config.http_token, config.http_token_file)
    tls = tls_of(config.http_cert, config.http_key)
    access = None
    if config.http_access:
        from saccade.pipeline.api.access import RoleAccess

        access = RoleAccess(Path(config.http_access), token)
    if place and access is None:
        check_open(place[0], token)
    open_by_default = place is None or is_loopback(place[0])
    policy = SourcePolicy(config.allow_sources, open_by_default=open_by_default)
    base = config.resolved()
    with ExitStack() as stack:
        state = _opened_state(config, file)
        desired = base
        if state is not None:
            stack.callback(state.close)
            if (kept := state.load(config)) is not None:
                desired = merge(kept[0], base, kept[1])
                if plan(base, desired):
                    log.warning("%s: restoring stream settings from before the restart", state.path)
        in_file = config.state == _IN_FILE
        make_controller = partial(Controller, base=base, desired=desired, file=file, state=state, save_at_once=in_file)
        if has_workers(config):
            opened_workers, kind = _ray(config)
            apart = state.path if state else file.path if file else Path("saccade")
            names = list(desired.named())
            workers = stack.enter_context(
                opened_workers(config, names, kind, apart, open_by_default=open_by_default, given_up=given_up)
            )
            controller = make_controller(workers)
            workers.on_wish = controller.update
        else:
            first = {name: stream for name, stream in desired.named().items() if name in base.named()}
            local, opened = stack.enter_context(
                opened_local(config, first, policy=policy, watched=place is not None, progress=progress)
            )
            controller = make_controller(local, first=opened)
        server = None
        if place is not None:
            from saccade.pipeline.api.http_server import serve  # FastAPI is slow to import and not always needed

            server = serve(controller, *place, token, tls=tls, access=access)
            stack.callback(server.close)
        yield OpenedRun(controller, server)


def has_workers(config: RunConfig) -> bool:
    """Return whether a configuration uses Ray workers."""
    return config.ray is not None or config.workers > 1


def _ray(config: RunConfig) -> tuple[Any, type]:
    """Import the modules that need Ray. Return (function that opens the workers, class of the worker actors)."""
    if config.ray is None:
        # Read when Ray is imported. Ray's servers listen on every address, so they require a token. By default Ray runs
        # workers at nice 15, where any other process on a busy machine takes the CPU from the cameras.
        os.environ.update(RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
        # Ray reads the token once: with another token, the second run of a process could not connect.
        os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    try:
        from saccade.pipeline.control.ray_run import opened_workers
        from saccade.pipeline.worker import WorkerActor
    except ImportError:
        flag = "--workers" if config.ray is None else "--ray"
        raise ConfigError(f"{flag} needs Ray: {install_command('ray')}") from None
    return opened_workers, WorkerActor


def _opened_state(config: RunConfig, file: ConfigFile | None) -> StateFile | None:
    """Open the state file, which stores stream changes that were made over HTTP. Return None if no file is used."""
    if config.state == _IN_FILE:
        if file is None:
            raise ConfigError("--state config needs a configuration file: start with --config FILE")
        return None
    if config.state is not None:
        return StateFile(Path(config.state))
    if file is None or not file.names_streams or config.http is None:
        return None
    name = f"{file.path.name}.state"
    for folder in (file.path.parent, Path.cwd()):
        if os.access(folder, os.W_OK):
            return StateFile(folder / name)
    log.warning("%s cannot be written, so changes made over HTTP are lost at exit; store them with --state FILE", name)
    return None
