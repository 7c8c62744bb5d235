"""An executor whose model is arithmetic, on real streams: thousands of schedules in the time of one real model's step.

What a step reads and writes on a device is there: batch slots that carry a sequence's state, pages and adapter slots
tagged with their owner, buffers of the step slots. A step that touches what is not its own, or too early, fails.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saccade.engine.core.request import PrefillWindow, ScheduledSequence, Step, StepKind
from saccade.engine.models.protocol import Adapter, Phase
from saccade.engine.runtime.cpu_executor import CpuStream
from saccade.engine.runtime.streams import Event, Stream
from saccade.engine.tasks.task import OutputState, Sampled, Sampling, TokenRule

EOS, COORD, VOCAB = 0, 5, 6
CONTENTS = 4  # images that differ: the next one shows the same again


class ViolationError(Exception):
    """A step has touched what is not its own, or not yet."""


def mix(*numbers: int) -> int:
    """A number that depends on all of them."""
    x = 0
    for number in numbers:
        x = ((x ^ number) * 0x9E3779B97F4A7C15 + 0x1234567) & (1 << 64) - 1
        x ^= x >> 29
    return x


def begin(image: int, adapter: Adapter | None, prompt: Sequence[int]) -> int:
    """State of a sequence whose prompt has been read."""
    return mix(image % CONTENTS, 0 if adapter is None else 1 + ord(adapter.name), *prompt)


def decide(state: int, phase: Phase, sampling: Sampling, number: int, rule: TokenRule) -> Sampled:
    """What a step samples from a state; `number` is its place in the sequence."""
    h = mix(state, min(phase, Phase.TOKEN))
    if phase >= Phase.TOKEN:
        tokens = sorted({*range(VOCAB)} - {*rule.forbidden} if rule.allowed is None else rule.allowed)
        scores = [-(mix(h, token) % 997) / 100 for token in rule.scored]
        if sampling.temperature > 0:
            h = mix(sampling.seed, number)
        token = tokens[h % len(tokens)]
        coordinate = h % 983 / 983 if rule.grounded and token == COORD else 0.0
        return float(token), coordinate, 0.0, *scores
    if phase is Phase.X_OR_EOS:
        return h % 997 / 997 * 4 - 1, h % 991 / 991, 0.0
    return h % 983 / 983, h % 977 / 977, 0.0


def carry_on(state: int, fed: tuple[float, ...]) -> int:
    """State after something has been fed."""
    return mix(state, *(hash(value) & (1 << 64) - 1 for value in fed))


def fed(output: OutputState, phase: Phase, values: Sampled) -> tuple[float, ...]:
    """What a device feeds after a sample, which does not know whether the answer ends there."""
    if not (output.draftable or output.certain):
        return values
    if phase is Phase.X_OR_EOS:
        return Phase.Y, values[1], 0.0
    return output.fed(phase, values) or (Phase.TOKEN, values[0], 0.0)


def alone(image: int, adapter: Adapter | None, prompt: Sequence[int], output: OutputState, start: int) -> None:
    """The answer of a loop that knows no steps in flight; `start` is the place of the prompt."""
    at = start + len(prompt) - 1
    states = {at: begin(image, adapter, prompt)}
    phase = output.next_phase()
    while phase is not None:
        values = decide(states[at], phase, output.sampling, at, output.rule())
        if output.commit(values):
            return
        given = fed(output, phase, values)
        phase = output.next_phase()
        at += 1 - output.back
        states[at] = carry_on(states[at - 1], given)


class SlotGuard:
    """Knows how far each slot's last step has come, and refuses what would disturb it. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unread: dict[int, int] = {}  # slot: step, from its launch until the host has read it
        self._copying: dict[int, int] = {}  # slot: step, from its sampling until its copy is done
        self._launched = 0

    def launch(self, slot: int) -> int:
        with self._lock:
            if slot in self._unread:
                raise ViolationError(f"slot {slot} is launched before step {self._unread[slot]} in it has been read")
            self._launched += 1
            self._unread[slot] = self._launched
            return self._launched

    def finalize(self, step: int) -> None:
        with self._lock:
            oldest = min(self._unread.values(), default=step)
            if oldest < step:
                raise ViolationError(f"step {step} is sampled before step {oldest} has been read")

    def write(self, slot: int, step: int) -> None:
        with self._lock:
            if slot in self._copying:
                raise ViolationError(f"step {step} writes slot {slot} while step {self._copying[slot]} is being copied")
            self._copying[slot] = step

    def copied(self, slot: int) -> None:
        with self._lock:
            self._copying.pop(slot, None)

    def read(self, slot: int) -> None:
        with self._lock:
            if slot in self._copying:
                raise ViolationError(f"slot {slot} is read before it has been copied")
            self._unread.pop(slot, None)

    def failed(self, slot: int) -> None:
        """It will never be read; what is on the streams runs on."""
        with self._lock:
            self._unread.pop(slot, None)


class SlowStream(CpuStream):
    """A stream whose work begins late now and then."""

    def __init__(self, name: str, dice: random.Random, slowest_s: float) -> None:
        self._dice, self._slowest_s = dice, slowest_s
        super().__init__(name)

    def run(self, work: Callable[[], None]) -> None:
        late_s = self._dice.choice([0.0, 0.0, self._dice.uniform(0, self._slowest_s)])

        def late() -> None:
            if late_s:
                time.sleep(late_s)
            work()

        super().run(late)


@dataclass(slots=True)
class _Fed:
    """A row as it was launched."""

    row: ScheduledSequence[int]
    owner: int
    request: int
    image: int
    adapter: Adapter | None
    adapter_slot: int
    batch_slot: int
    prefix: tuple[int, ...]
    pages: tuple[int, ...]
    at: int  # position of what is fed

    def touches(self, other: _Fed) -> bool:
        """Whether it begins where the other still is."""
        adapters = self.adapter_slot == other.adapter_slot and self.adapter is not other.adapter
        shared = {*self.prefix, *self.pages} & {*other.prefix, *other.pages}
        return adapters or self.batch_slot == other.batch_slot or bool(shared)


class StandIn:
    """An `executor.Executor`. Pages are tagged by their owners; a page is private to one sequence."""

    def __init__(
        self, depth: int, n_batch_slots: int, n_pages: int, dice: random.Random, slowest_s: float = 3e-4
    ) -> None:
        self._calls = dice.random() < 0.5  # as a CPU does; else it is asked, as a GPU
        self.guard = SlotGuard()
        self._compute, self._copy = (SlowStream(name, dice, slowest_s) for name in ("compute", "copy"))
        self._last: dict[int, tuple[float, ...]] = {}  # by batch slot, what its sequence has sampled last
        self._states: dict[tuple[int, int], int] = {}  # of a sequence behind a position: its keys and values
        self._pages: list[int] = [0] * n_pages
        self._adapters: dict[int, Adapter | None] = {}
        self._rows: list[list[_Fed]] = [[] for _ in range(depth)]
        self._flying: dict[int, list[_Fed]] = {}  # launched and not read
        self._images: dict[PrefillWindow[int], int] = {}
        self._on_ready: Callable[[], None] = lambda: None
        self._steps = [0] * depth
        self._sampled: list[list[Sampled]] = [[] for _ in range(depth)]
        self._host: list[list[Sampled]] = [[] for _ in range(depth)]
        self._ready: list[Event | None] = [None] * depth

    @property
    def streams(self) -> dict[str, Stream]:
        return {"compute": self._compute, "copy": self._copy}

    def launch(self, slot: int, step: Step[int]) -> None:
        try:
            self._steps[slot] = self.guard.launch(slot)
        except ViolationError as error:
            self._compute.run(_raiser(error))
        rows = [_fed(row, step.kind, self._image(row.sequence.window)) for row in step.sequences]
        if step.kind is StepKind.PREFILL:
            flying = [fed for other in self._flying.values() for fed in other]
            if any(fed.touches(other) for fed in rows for other in flying):
                self._compute.run(_raiser(ViolationError("what a step in flight uses has been given away")))
        self._rows[slot] = self._flying[slot] = rows
        self._compute.run(lambda: self._forward(rows, step.kind))

    def finalize(self, slot: int, step: Step[int]) -> None:
        number, rows = self._steps[slot], self._rows[slot]
        try:
            if step.writes_text:
                self.guard.finalize(number)
        except ViolationError as error:
            self._compute.run(_raiser(error))
        outputs = [row.sequence.output for row in step.sequences]
        rules = [row.rule for row in step.sequences]

        def sample() -> None:
            self.guard.write(slot, number)
            self._sampled[slot] = []
            for one, output, rule in zip(rows, outputs, rules, strict=True):
                values = decide(self._state(one, one.at), one.row.phase, output.sampling, one.at, rule)
                if one.row.alone:
                    self._last[one.batch_slot] = fed(output, one.row.phase, values)
                self._sampled[slot].append(values)

        def copy() -> None:
            self._host[slot] = list(self._sampled[slot])
            self.guard.copied(slot)

        self._compute.run(sample)
        self._copy.wait(self._compute.record())
        self._copy.run(copy)
        self._ready[slot] = self._copy.record(reached=self._on_ready)

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        self._on_ready = callback
        return self._calls

    def wait(self, slot: int, step: Step[int]) -> None:
        ready = self._ready[slot]
        assert ready is not None
        ready.synchronize()

    def has_run(self, slot: int) -> bool:
        ready = self._ready[slot]
        return ready is not None and ready.query()

    def read(self, slot: int, step: Step[int]) -> list[Sampled]:
        ready = self._ready[slot]
        assert ready is not None
        self._flying.pop(slot, None)
        try:
            ready.synchronize()
        except BaseException:
            self.guard.copied(slot)
            self.guard.read(slot)
            raise
        self.guard.read(slot)
        return self._host[slot]

    def failed(self, slot: int) -> None:
        """To be called when a part of the slot's step raises."""
        self._flying.pop(slot, None)
        self.guard.failed(slot)

    def close(self) -> None:
        self._compute.close()
        self._copy.close()

    def _image(self, window: PrefillWindow[int]) -> int:
        """The number of a window's image, which it gives up once it is prefilled."""
        if window.image is not None:
            self._images[window] = window.image
        return self._images[window]

    def _forward(self, rows: list[_Fed], kind: StepKind) -> None:
        for fed in rows:
            if kind is StepKind.PREFILL:
                if fed.adapter is not None:
                    self._adapters[fed.adapter_slot] = fed.adapter
                for page in fed.prefix:
                    self._pages[page] = fed.request
                for page in fed.pages:
                    self._pages[page] = fed.owner
                if fed.row.value is None:
                    self._states[fed.owner, fed.at] = begin(fed.image, fed.adapter, fed.row.sequence.prompt)
                else:
                    self._feed(fed, fed.row.value)
                continue
            if fed.adapter is not None and self._adapters[fed.adapter_slot] is not fed.adapter:
                raise ViolationError("an adapter has lost its slot while it was used")
            if any(self._pages[page] != fed.request for page in fed.prefix):
                raise ViolationError("the pages of an image have been taken while they were read")
            if any(self._pages[page] != fed.owner for page in fed.pages):
                raise ViolationError("the pages of a sequence have been taken while they were written")
            self._feed(fed, fed.row.value or self._last[fed.batch_slot])

    def _state(self, fed: _Fed, at: int) -> int:
        """What a sequence's keys and values hold up to a position."""
        return self._states[fed.owner, at]

    def _feed(self, fed: _Fed, value: tuple[float, ...]) -> None:
        """Write a position behind the one before it; those behind it are of no use any more."""
        self._states[fed.owner, fed.at] = carry_on(self._state(fed, fed.at - 1), value)
        self._states.pop((fed.owner, fed.at + 1), None)


class FaultError(Exception):
    """What a `Faulty` executor raises."""


class Faulty(StandIn):
    """Fails now and then: before a part of a step is on the streams, behind it, or on them.

    Attributes:
        hit: images of the steps that have failed.
    """

    def __init__(self, depth: int, n_batch_slots: int, n_pages: int, dice: random.Random, rate: float) -> None:
        super().__init__(depth, n_batch_slots, n_pages, dice)
        self._faults, self._rate = random.Random(dice.random()), rate
        self.hit: set[int] = set()
        self._unfilled: set[int] = set()  # images whose prefill fails on the stream

    def launch(self, slot: int, step: Step[int]) -> None:
        if self._struck(step):
            self._unfilled.update(self._image(window) for window in step.windows)
            self._compute.run(_raiser(FaultError("on the stream")))
        self._faltering(super().launch, slot, step)

    def finalize(self, slot: int, step: Step[int]) -> None:
        self._faltering(super().finalize, slot, step)

    def _forward(self, rows: list[_Fed], kind: StepKind) -> None:
        # What a failed prefill was to fill is not there for the decode step that is on the stream behind it already.
        super()._forward([fed for fed in rows if fed.image not in self._unfilled], kind)

    def _state(self, fed: _Fed, at: int) -> int:
        # Nor is what a failed step was to write: a device computes something, which nobody reads.
        return self._states.get((fed.owner, at), 0) if fed.image in self.hit else super()._state(fed, at)

    def _struck(self, step: Step[int]) -> bool:
        if self._faults.random() >= self._rate:
            return False
        self.hit.update(self._image(row.sequence.window) for row in step.sequences)
        return True

    def _faltering(self, part: Callable[[int, Step[int]], None], slot: int, step: Step[int]) -> None:
        early = self._struck(step)
        if not early:
            part(slot, step)
        if early or self._struck(step):
            self.failed(slot)
            raise FaultError("before it is on the stream" if early else "behind it")


def _fed(row: ScheduledSequence[int], kind: StepKind, image: int) -> _Fed:
    sequence, window = row.sequence, row.sequence.window
    first = kind is StepKind.PREFILL and row.value is None
    at = row.position + (len(sequence.prompt) - 1 if first else 0)
    return _Fed(
        row,
        id(sequence),
        id(window),
        image,
        window.request.adapter,
        window.adapter_slot,
        sequence.batch_slot,
        window.pages,
        sequence.pages,
        at,
    )


def _raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
