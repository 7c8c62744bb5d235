"""Delivers a run's results to its sinks: an outbox and a thread per sink."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from saccade.engine.results import Result
from saccade.pipeline.config.queue_policy import WAIT, QueuePolicy
from saccade.pipeline.runtime.bounded_queue import BoundedQueue, QueueClosed, Taken
from saccade.pipeline.runtime.output import Output
from saccade.sinks import Latency, ReaderGoneError, SinkClosedError, SinkError, SinkStatus, SupportsStreamEnd
from saccade.sources import Frame

log = logging.getLogger(__name__)

_LIVE_OUTBOX = QueuePolicy(8, "drop oldest")


@dataclass(slots=True, frozen=True)
class Delivery:
    """A frame with its result and latency."""

    frame: Frame
    result: Result
    latency: Latency


class OutputDelivery:
    """Delivers results to the sinks of one run. Thread-safe.

    Args:
        outputs: the sinks.
        name: name of the stream.
        live: whether results come at their own pace. A slow sink then drops results, and a failed sink is retried.
        stop: called when continuing is useless.
        fail: called with the error that ends the run.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        name: str,
        *,
        live: bool,
        stop: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._outputs = [
            (output, BoundedQueue[Delivery](output.outbox or (_LIVE_OUTBOX if live else WAIT))) for output in outputs
        ]
        self._name, self._live, self._stop, self._fail = name, live, stop, fail

    def work(self) -> list[tuple[str, Callable[[], None]]]:
        """Return the work of each sink's thread, with the name of the sink; it returns when the sink is done."""
        return [(type(output.sink).__name__, partial(self._write, output, outbox)) for output, outbox in self._outputs]

    def put(self, delivery: Delivery, lost: int) -> None:
        """Pass a result to every sink; `lost` frames were dropped before it."""
        for _, outbox in self._outputs:
            with suppress(QueueClosed):  # a failed sink ends the run; the other sinks still get the results in flight
                outbox.put(delivery, lost)

    def close(self) -> None:
        """Close the outboxes; no more results follow."""
        for _, outbox in self._outputs:
            outbox.close()

    def drops(self) -> Counter[str]:
        """The number of results dropped by slow sinks, by cause; results missed by viewers do not count."""
        drops: Counter[str] = Counter()
        for output, outbox in self._outputs:
            if not output.viewing:
                drops.update({f"sink {cause}": count for cause, count in outbox.drops.items()})
        return drops

    def waiting(self) -> dict[str, int]:
        """The number of results that wait for each sink."""
        return {f"{number} {output.name}": len(outbox) for number, (output, outbox) in enumerate(self._outputs)}

    def statuses(self) -> list[SinkStatus]:
        """The status of each sink that belongs only to this run."""
        return [output.guard.status() for output, _ in self._outputs if not output.shared]

    def _write(self, output: Output, outbox: BoundedQueue[Delivery]) -> None:
        guard = output.guard
        try:
            while True:
                self._write_one(output, outbox.get())
                if guard.paused and not self._live and not self._any_sink_works():
                    break  # reading the rest of a file is useless; a live source continues until the sink works again
        except QueueClosed:
            pass  # the run has ended
        except ReaderGoneError as error:
            log.info("%s: %s", self._name, error)
            if not self._any_sink_works():
                self._stop()
        except SinkClosedError:
            self._stop()  # the user has stopped the run
        except Exception as error:
            self._fail(error)
        finally:
            outbox.discard()
            try:
                self._finish(output)
                lost, reason = guard.end(self._name)
                if lost and not self._live:
                    raise SinkError(f"{reason}; results lost: {lost}")
            except Exception as error:
                self._fail(error)

    def _write_one(self, output: Output, taken: Taken[Delivery]) -> None:
        """Write one result. As a separate function, no local variable keeps the frame alive during the next wait."""
        frame = taken.item.frame.changed(dropped_before=taken.lost_before)
        output.guard.write(frame, taken.item.result, taken.item.latency)

    def _any_sink_works(self) -> bool:
        return any(output.guard.works for output, _ in self._outputs)

    def _finish(self, output: Output) -> None:
        if not output.shared:
            output.sink.close()
        elif isinstance(output.sink, SupportsStreamEnd):
            output.sink.end(self._name)
