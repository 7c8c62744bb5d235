"""Replaces workers by others of another configuration, one after another, while other streams go on.

Beside each worker another is started, under the next name: `1.2` for `1`. Once it is ready the streams move to it, one
by one, each with the gap of a new connection, and the first ends. So there is one worker more than usual at a time, for
which the machine needs the memory. If a worker cannot begin, or cannot have a stream, those that were replaced are
brought back likewise. Knows no configurations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from saccade.pipeline.workers.protocol import MakeWorker
from saccade.pipeline.workers.states import START_S, WorkerSeat
from saccade.pipeline.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

Configs = Mapping[str, Mapping[str, Any]]
_FEW = 3  # ends of a new worker while streams come to it, after which it is given up
_END_S = 15.0


class RollError(Exception):
    """The workers are what they were; `str()` of it is why, in one line for the user."""


def replace_workers(
    supervisor: Supervisor,
    make: MakeWorker,
    configs: Configs,
) -> None:
    """Replace all workers; returns when that is done.

    Files that are being read are not moved: their worker ends when they are through.

    Args:
        supervisor: whose workers.
        make: makes the new ones.
        configs: configurations that streams have from then on, by name; others keep theirs.

    Raises:
        RollError: if one cannot be replaced, and everything goes on as it was.
    """
    before = {name: dict(stream.config) for name, stream in supervisor.streams().items()}
    replaced: list[tuple[str, MakeWorker | None]] = []
    try:
        for seat in supervisor.seats():
            name = _replace(supervisor, seat, make, configs, before)
            replaced.append((name, seat.make))
    except RollError as error:
        for name, old in replaced if not supervisor.stopping else []:
            try:
                seat = next(seat for seat in supervisor.seats() if seat.name == name)
                _replace(supervisor, seat, old, before, {})
            except (RollError, StopIteration) as problem:
                log.warning("worker %s could not be brought back: %s", name, problem)
        raise RollError(str(error)) from None
    finally:
        supervisor.forget_configs()


def next_name(name: str, others: set[str]) -> str:
    """The name of the worker that replaces one: `1.2` for `1`, `1.3` for `1.2`; none of `others`."""
    number, _, generation = name.partition(".")
    following = int(generation or 1) + 1
    while f"{number}.{following}" in others:
        following += 1
    return f"{number}.{following}"


def _replace(
    supervisor: Supervisor,
    old: WorkerSeat,
    make: MakeWorker | None,
    configs: Configs,
    before: Configs,
) -> str:
    """Replace one worker; returns the name of the new one."""
    new = supervisor.add_worker(next_name(old.name, {seat.name for seat in supervisor.seats()}), make, configs)
    supervisor.wait_until(lambda: not new.trial or (new.starts > 0 and new.worker is None), START_S + _END_S)
    if new.trial:
        supervisor.remove_worker(new.name, _END_S)
        raise RollError(f"worker {old.name} cannot be replaced: {new.reason or 'the new one does not begin'}")
    supervisor.drain(old.name)
    problem = ""

    def over() -> bool:
        nonlocal problem
        streams = list(supervisor.streams().values())
        problem = next((f"{one.name}: {one.stays}" for one in streams if one.stays), "")
        if new.failures >= _FEW:
            problem = f"worker {new.name} has ended again and again: {new.reason}"
        left = [one for one in streams if one.worker == old.name or one.before is not None]  # there, or on the way
        return bool(problem) or not [one for one in left if one.phase != "failed"]

    supervisor.wait_until(over, None)
    if supervisor.stopping:
        raise RollError("everything is being closed")
    if problem:
        supervisor.drain(old.name, False, before)
        supervisor.drain(new.name)
        supervisor.wait_until(lambda: not supervisor.has_streams(new.name), None)
        supervisor.remove_worker(new.name, _END_S)
        raise RollError(problem)
    supervisor.remove_worker(old.name, _END_S)
    return new.name
