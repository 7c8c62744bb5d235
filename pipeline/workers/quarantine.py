"""Which stream makes workers crash: after a crash, its streams are opened again one at a time. Pure, without a clock.

Only signals that a process gets for its own faults count, not those that others send: a library that fails on what one
camera sends would else take the streams of one worker after the other with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saccade.pipeline.workers.states import StreamState

CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"})
PROBATION_S = 10.0  # that a suspect must have been open before the next is opened beside it
STRIKES = 2  # crashes while a stream was the only one on probation, after which it is taken to be the cause
_LONG_S = 60.0  # open for so long, a stream is no suspect any more


class Quarantine:
    """Holds the streams that were there when a worker crashed. Not thread-safe."""

    def __init__(self) -> None:
        self._strikes: dict[str, int] = {}

    def crashed(self, streams: Sequence[StreamState], now_s: float) -> list[StreamState]:
        """Note that a worker has crashed which had these streams; returns those that are taken to be the cause."""
        for stream in streams:
            if stream.phase == "open" and now_s > stream.opened_at + _LONG_S:
                self._strikes.pop(stream.name, None)
        tried = [stream for stream in streams if self._on_probation(stream, now_s)]
        for stream in streams:
            self._strikes.setdefault(stream.name, 0)
        if len(tried) != 1:
            return []
        self._strikes[tried[0].name] += 1
        if self._strikes[tried[0].name] < STRIKES:
            return []
        del self._strikes[tried[0].name]
        return tried

    def may_open(self, stream: StreamState, others: Iterable[StreamState], now_s: float) -> bool:
        """Whether a stream may be opened at a worker now, beside the others that it has."""
        return stream.name not in self._strikes or not any(self._on_probation(other, now_s) for other in others)

    def _on_probation(self, stream: StreamState, now_s: float) -> bool:
        young = stream.phase == "opening" or (stream.phase == "open" and now_s < stream.opened_at + PROBATION_S)
        return young and stream.name in self._strikes
