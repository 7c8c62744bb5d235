"""The way from a run's results to its sinks: an outbox and a thread's work for each. Knows no engine and no threads."""

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
    """A frame with what was found in it, and how long that took."""

    frame: Frame
    result: Result
    latency: Latency


class OutputDelivery:
    """Delivers to the sinks of one run. Every method may be called by any thread.

    Args:
        outputs: the sinks.
        name: of the stream.
        live: whether results come at a pace of their own: a slow sink loses some then, and a failed one is waited for.
        stop: called where there is no use in going on.
        fail: called with whatever ends the run.
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
        """What a thread each is to do, by the name of its sink; it returns when the sink is through."""
        return [(type(output.sink).__name__, partial(self._write, output, outbox)) for output, outbox in self._outputs]

    def put(self, delivery: Delivery, lost: int) -> None:
        """Hand one to every sink; `lost` frames were lost before it."""
        for _, outbox in self._outputs:
            with suppress(QueueClosed):  # a sink that failed ends the run; the others still get what is in flight
                outbox.put(delivery, lost)

    def close(self) -> None:
        """Nothing more will come."""
        for _, outbox in self._outputs:
            outbox.close()

    def drops(self) -> Counter[str]:
        """What sinks were too slow for, by cause; what viewers missed is no loss."""
        drops: Counter[str] = Counter()
        for output, outbox in self._outputs:
            if not output.viewing:
                drops.update({f"sink {cause}": count for cause, count in outbox.drops.items()})
        return drops

    def waiting(self) -> dict[str, int]:
        """How many wait for each sink."""
        return {f"{number} {output.name}": len(outbox) for number, (output, outbox) in enumerate(self._outputs)}

    def statuses(self) -> list[SinkStatus]:
        """The status of each sink that is this run's own."""
        return [output.guard.status() for output, _ in self._outputs if not output.shared]

    def _write(self, output: Output, outbox: BoundedQueue[Delivery]) -> None:
        guard = output.guard
        try:
            while True:
                self._write_one(output, outbox.get())
                if guard.paused and not self._live and not self._any_sink_works():
                    break  # no use in reading the rest of a file; a live source goes on until the sink works again
        except QueueClosed:
            pass  # nothing more will come
        except ReaderGoneError as error:
            log.info("%s: %s", self._name, error)
            if not self._any_sink_works():
                self._stop()
        except SinkClosedError:
            self._stop()  # the user has ended the run
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
        """Not a part of the loop, whose variables would keep the frame while it waits for the next one."""
        frame = taken.item.frame.changed(dropped_before=taken.lost_before)
        output.guard.write(frame, taken.item.result, taken.item.latency)

    def _any_sink_works(self) -> bool:
        return any(output.guard.works for output, _ in self._outputs)

    def _finish(self, output: Output) -> None:
        if not output.shared:
            output.sink.close()
        elif isinstance(output.sink, SupportsStreamEnd):
            output.sink.end(self._name)
