"""The store of a machine of the cluster that is not the supervisor's: an actor there, which all workers there share.

It outlives them, is started again by Ray if it dies, and is then served at the same address: a file in the store's
folder has that, with what the supervisor has asked for, for its owner alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from saccade.pipeline.errors import ConfigError, one_line
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import StoreError
from saccade.pipeline.workers.machines.store_server import StoreServer

log = logging.getLogger(__name__)

STORES = "store-"
"""What the names of the actors begin with; the node's id follows."""
FOLDER = "SACCADE_STORE"
"""The variable of the environment of `ray start` that names another folder on its machine."""
_BEGIN_S = 60.0  # for the actor to be scheduled and its module loaded, on a busy machine
_FILE = "served.json"


class StoreActor:
    """What runs in the actor.

    Args:
        folder: that a relative path of the store begins in; left as it is where this machine has no such folder.
        store: path of the store's folder.
    """

    def __init__(self, folder: str, store: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._folder = Path(store).absolute()
        self._store: EventStore | None = None
        self._server: StoreServer | None = None
        self._about: dict[str, Any] = {}
        if ray.get_runtime_context().was_current_actor_reconstructed:
            with contextlib.suppress(OSError, ValueError, StoreError, ConfigError):
                self._serve(json.loads((self._folder / _FILE).read_text()))

    def begin(self, values: Mapping[str, Any], host: str) -> dict[str, Any] | str:
        """Serve the store, unless that has begun.

        Args:
            values: `keep_s` and `max_bytes` of an `EventStore`, and the `secret` of the front.
            host: address of this machine.

        Returns:
            `name` of the machine, `url` and `media`, the folder of clips and snapshots; or why there is none.
        """
        try:
            if self._server is None or self._about["secret"] != values["secret"]:
                self._serve({**self._known(), **values, "host": host})
        except (StoreError, ConfigError) as error:
            return one_line(str(error))
        assert self._server is not None
        assert self._store is not None
        return {"name": self._about["name"], "url": self._server.url, "media": str(self._store.media_folder)}

    def close(self) -> None:
        """End."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _known(self) -> dict[str, Any]:
        """How it was served last."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self._folder / _FILE).read_text())
            return found
        return {}

    def _serve(self, about: Mapping[str, Any]) -> None:
        self.close()
        name = about.get("name") or f"{about['host']}-{secrets.token_hex(3)}"
        self._store = EventStore(
            self._folder, keep_s=about["keep_s"], max_bytes=about["max_bytes"], keep_open=True
        )  # what has ended meanwhile, the front says
        try:
            self._server = StoreServer(self._store, about["secret"], about["host"], about.get("port", 0))
        except ConfigError:  # another has the port
            self._server = StoreServer(self._store, about["secret"], about["host"])
        port = int(self._server.url.rpartition(":")[2])
        self._about = {**about, "name": name, "port": port}
        path = self._folder / _FILE
        with contextlib.suppress(OSError):
            path.touch(0o600)
            path.write_text(json.dumps(self._about))


def store_here(settings: Mapping[str, Any], folder: str, host: str) -> dict[str, Any]:
    """Where a worker on this machine keeps events and their files, as settings of `WorkerRun`; made if there is none.

    Nothing if no events are kept, if the supervisor is on this machine, or if the store cannot be used here: such as
    one in a folder that the machines share, which is the supervisor's.

    Args:
        settings: of the worker.
        folder: as in `StoreActor`.
        host: address of this machine.
    """
    keep = settings.get("keep")
    node = ray.get_runtime_context().get_node_id()
    if keep is None or node == settings.get("front_node"):
        return {}
    made = ray.remote(StoreActor).options(
        name=f"{STORES}{node}",
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    actor: Any = made.remote(folder, os.environ.get(FOLDER) or keep["folder"])
    values = {"keep_s": keep["keep_s"], "max_bytes": keep["max_bytes"], "secret": settings["secret"]}
    found: Any = ray.get(actor.begin.remote(values, host), timeout=_BEGIN_S)
    if isinstance(found, str):
        log.warning("events are stored on the supervisor's machine: %s", found)
        return {}
    return {"machine": found["name"], "store": found["url"], "media": found["media"]}


def end_stores(timeout_s: float) -> None:
    """End the stores of all machines."""
    names: Any = ray.util.list_named_actors()  # of our namespace
    for name in names:
        if name.startswith(STORES):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                actor = ray.get_actor(name)
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(actor.close.remote(), timeout=timeout_s)
                ray.kill(actor)
