"""Delivers the results of a run to its sinks. Each sink has its own bounded queue, called an outbox."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from saccade.engine.results import Result
from saccade.pipeline.config.queue_policy import WAIT, QueuePolicy
from saccade.pipeline.runtime.bounded_queue import BoundedQueue, QueueClosed, Taken
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.shared_threads import SharedTask
from saccade.sinks import Latency, ReaderGoneError, SinkClosedError, SinkStatus, SupportsStreamEnd
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
    """Delivers results to the sinks of one run, in separate threads. Thread-safe.

    Args:
        outputs: the sinks.
        name: name of the stream.
        live: whether the stream is live. For a live stream, the queue of a slow sink drops results, and a failed sink
            is retried.
        stop: called to stop the run when every sink has failed.
        fail: called with the error that ends the run.
        ended: called once per sink after the sink has ended, in the thread of the sink.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        name: str,
        *,
        live: bool,
        stop: Callable[[], None],
        fail: Callable[[Exception], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.live, self.stop, self.fail, self.ended = name, live, stop, fail, ended
        self._outboxes = [_Outbox(output, self) for output in outputs]

    def start(self) -> None:
        """Start the threads that write to the sinks.

        Raises:
            RuntimeError: if a thread cannot be started. The threads that were already started are then ended.
        """
        started: list[_Outbox] = []
        try:
            for outbox in self._outboxes:
                outbox.open()
                started.append(outbox)
        except RuntimeError:
            for outbox in started:
                outbox.call_off()
            raise

    def put(self, delivery: Delivery, lost: int) -> None:
        """Add a result to the queue of every sink.

        Args:
            delivery: the result with its frame.
            lost: number of frames dropped before this result.
        """
        for outbox in self._outboxes:
            outbox.put(delivery, lost)

    def close(self) -> None:
        """Close the queues of all sinks. The sinks still write the queued results."""
        for outbox in self._outboxes:
            outbox.close()

    def call_off(self) -> None:
        """End the threads of `start`. The sinks stay open. Must not be called after the first result was added."""
        for outbox in self._outboxes:
            outbox.call_off()

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the threads of sinks that are not shared. Return whether they ended."""
        deadline = time.monotonic() + timeout_s
        own = [outbox.output.threads for outbox in self._outboxes if not outbox.output.shared]
        return all(threads.join(max(0.0, deadline - time.monotonic())) for threads in own)

    def drops(self) -> Counter[str]:
        """The number of results dropped from the queues of slow sinks, by cause.

        Sinks that only show results to viewers are not included.
        """
        drops: Counter[str] = Counter()
        for outbox in self._outboxes:
            if not outbox.output.viewing:
                drops.update({f"sink {cause}": count for cause, count in outbox.queue.drops.items()})
        return drops

    def waiting(self) -> dict[str, int]:
        """The number of results in the queue of each sink. A key is the index and the name of the sink."""
        return {f"{number} {outbox.output.name}": len(outbox.queue) for number, outbox in enumerate(self._outboxes)}

    def statuses(self) -> list[SinkStatus]:
        """The status of each sink that only this run uses."""
        return [outbox.output.guard.status() for outbox in self._outboxes if not outbox.output.shared]

    @property
    def any_sink_works(self) -> bool:
        """Whether at least one sink is neither paused nor ended."""
        return any(outbox.output.guard.works for outbox in self._outboxes)


class _Outbox:
    def __init__(self, output: Output, delivery: OutputDelivery) -> None:
        self.output, self._delivery = output, delivery
        self.queue = BoundedQueue[Delivery](output.outbox or (_LIVE_OUTBOX if delivery.live else WAIT))
        self._task: SharedTask | None = None
        self._over = False

    def open(self) -> None:
        self._task = self.output.threads.open(self._write)

    def call_off(self) -> None:
        if self._task is not None:
            self._task.close()
            self._task = None

    def put(self, delivery: Delivery, lost: int) -> None:
        with suppress(QueueClosed):  # a failed sink ends the run; the other sinks still get the rest
            self.queue.put(delivery, lost)
            if self._task is not None:
                self._task.call()

    def close(self) -> None:
        self.queue.close()
        if self._task is not None:
            self._task.call()

    def _write(self) -> None:
        if self._over:
            return
        run, guard = self._delivery, self.output.guard
        try:
            while (taken := self.queue.take()) is not None:
                self._write_one(taken)
                del taken  # the variable would keep the frame in memory
                if guard.paused and not run.live and not run.any_sink_works:
                    break  # no sink is left for the rest of a file; a live source continues until a sink works again
            else:
                return
        except QueueClosed:
            pass  # the run has ended
        except ReaderGoneError as error:
            log.info("stream %s: an output no longer receives results: %s", run.name, error)
            if not run.any_sink_works:
                run.stop()
        except SinkClosedError:
            run.stop()  # the user has stopped the run
        except Exception as error:
            run.fail(error)
        self._finish()

    def _write_one(self, taken: Taken[Delivery]) -> None:
        """Write one result to the sink."""
        # A separate function, so that the frame is freed before the caller waits for the next result.
        frame = taken.item.frame.changed(dropped_before=taken.lost_before)
        self.output.guard.write(frame, taken.item.result, taken.item.latency)

    def _finish(self) -> None:
        self._over = True
        run, output = self._delivery, self.output
        self.queue.discard()
        try:
            if not output.shared:
                output.sink.close()
            elif isinstance(output.sink, SupportsStreamEnd):
                output.sink.end(run.name)
            dropped = output.guard.end(run.name)
            if dropped is not None and not run.live:
                raise dropped
        except Exception as error:
            run.fail(error)
        finally:
            self.call_off()
            run.ended()
