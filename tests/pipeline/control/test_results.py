"""Results of workers that the controller writes to the shared outputs."""

from __future__ import annotations

from saccade.pipeline.control.results import RelaySink, ResultReceiver
from saccade.pipeline.runtime.output import Output
from saccade.sinks import SinkError
from tests.support.sinks.results import LATENCY, live_frame, showing


class FullDisk:
    shared = True

    def write(self, *what: object) -> None:
        raise SinkError("the disk is full")

    def close(self) -> None: ...


def test_an_output_that_fails_is_told_as_paused() -> None:
    output = Output(FullDisk(), shared=True)
    receiver = ResultReceiver([output], lambda name: True)
    relay = RelaySink(receiver.take)
    relay.write(live_frame(1.0), showing("person"), LATENCY)
    relay.end("door")
    receiver.wait_end("door", 10)
    status = output.guard.status()
    assert (status.state, status.reason, status.lost) == ("paused", "the disk is full", 1)
