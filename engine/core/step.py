"""What is scheduled: image requests, their sequences, and the steps that run them. Plain values, no torch."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from saccade.engine.core.adapters import NO_SLOT, Adapter
from saccade.engine.phase import TEXT_PHASES, Phase
from saccade.engine.tasks.output_state import ANY_TOKEN, DraftMemory, FedValue, OutputState, TokenRule

ImageT = TypeVar("ImageT")
"""An image as the executor takes it."""


@dataclass(slots=True, eq=False)
class Sequence(Generic[ImageT]):
    """A prompt and the answer that grows behind it.

    Attributes:
        prompt: token ids.
        values: what stands in the prompt in place of the embeddings of some of its tokens, by their places: one number
            is a coordinate, two are a size.
        output: says what each step samples, and holds the answer.
        trunk: the sequence, ahead of it in the request, whose prompt its own begins with: they share whole pages of it.
        request: the image it is about.
        n_pages: private pages that the whole answer may need; set once, when the request is queued.
        n_shared: pages of the trunk that it reads; their tokens are no part of its prompt any more. Likewise.
        batch_slot: its place in the executor's state; -1 while it holds none.
        pages: private pages, for prompt and answer.
        position: where the next token goes.
        inflight_refs: launched and uncommitted steps that it is part of.
        finalized: no more steps are wanted; those in flight are zombies.
        memory: what is known of earlier answers to this prompt, for a draft; None where nothing is kept.
        found: objects that the executor expects the answer to say, from its image: (any, x, y, width, height) of each.
        feed: what its next step feeds: the last value, and a draft behind it; empty where the device has the last one.
        verifying: a step with a draft of it is in flight: the next one depends on it.
        started: its prompt has been read.
        decodes: decode steps so far; of them, `misses` in a row whose draft was wrong at once.
        drafted, committed: values of drafts that were fed, and values of the answer.
    """

    prompt: tuple[int, ...]
    output: OutputState
    values: abc.Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    trunk: Sequence[ImageT] | None = None
    request: ImageRequest[ImageT] = field(init=False)
    n_pages: int = 0
    n_shared: int = 0
    batch_slot: int = -1
    pages: tuple[int, ...] = ()
    position: int = 0
    inflight_refs: int = 0
    finalized: bool = False
    memory: DraftMemory | None = None
    found: abc.Sequence[abc.Sequence[float]] = ()
    feed: tuple[FedValue, ...] = ()
    verifying: bool = False
    started: bool = False
    decodes: int = 0
    misses: int = 0
    drafted: int = 0
    committed: int = 0


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """An image's prefix that outlives the request that has prefilled it; see `Scheduler.release_prefix`.

    Attributes:
        pages: held once for it; none before its prefill is committed, and once it is released.
    """

    pages: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class ImageRequest(Generic[ImageT]):
    """An image and the prompts on it; or a kept prefix and the prompts behind it; or prompts without an image.

    Attributes:
        image: for the executor; None before it is prepared, and once its prefill is committed or the request is over
            before that, so that a future that is kept does not keep 0.4 to 5.6 MB of crops on the device.
        sequences: one for each prompt.
        done: called once when every sequence is complete, or with the error that ended the request.
        deadline: `time.monotonic()` at which the request ends if it is not over.
        adapter: what its prefix and its answers are computed with besides the model.
        reads: a prefix that is there already, in place of an image.
        keeps: what its image's prefix is kept as; it has no prompts then.
        has_prefix: whether the prompts stand behind an image's prefix.
        pages: pages of the image's prefix, held once by each sequence.
        adapter_slot: where its adapter is on the device, held likewise.
        prepare: cuts the image, where `image` is not there yet; called once, after the request is admitted, by a thread
            that is not the scheduler's.
        window: number of the part of the image that it is, the whole is 0.
        waiting: what `admission` knows of it until it is over.
        live: it is of a stream whose newer requests replace those that wait; once it is admitted.
        measured: it is known to fit, and holds the kept prefix that it reads.
        admitted: it has pages and batch slots.
        over: `done` has been called.
        admitted_at: `time.monotonic()` when its image began to be prepared, where that was left for then.
        launched_at, prefilled_at: the same when its prefill was launched and committed.
    """

    image: ImageT | None
    sequences: list[Sequence[ImageT]]
    done: abc.Callable[[ImageRequest[ImageT], BaseException | None], None]
    deadline: float = math.inf
    adapter: Adapter | None = None
    reads: KeptPrefix | None = None
    keeps: KeptPrefix | None = None
    has_prefix: bool = True
    pages: tuple[int, ...] = ()
    adapter_slot: int = NO_SLOT
    prepare: abc.Callable[[], ImageT] | None = None
    window: int = 0
    waiting: object = None
    live: bool = False
    measured: bool = False
    admitted: bool = False
    over: bool = False
    admitted_at: float = 0.0
    launched_at: float = 0.0
    prefilled_at: float = 0.0

    def __post_init__(self) -> None:
        for sequence in self.sequences:
            sequence.request = self

    @property
    def encodes(self) -> bool:
        """Whether it has an image of its own, now or once that is prepared."""
        return self.has_prefix and self.reads is None

    @property
    def prepared(self) -> bool:
        """Whether it can be prefilled as far as its image goes."""
        return self.image is not None or not self.encodes

    def drop_image(self) -> None:
        """Give up the image, and what it would be cut from."""
        self.image = self.prepare = None


class StepKind(StrEnum):
    """What a step runs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)  # not frozen, which takes four times as long: each step makes one a sequence
class ScheduledSequence(Generic[ImageT]):
    """A row of a step: what a sequence feeds at a position, and samples behind it. With a draft it has several.

    Attributes:
        sequence: whose.
        phase: what is sampled.
        position: of the token that is fed (decode), or of the prompt's first one (prefill).
        rule: what a token may be; set by `Scheduler.finalize`.
        value: what is fed; None for what the sequence has sampled last, or for its prompt. In place of `FROM_IMAGE` the
            executor puts what it finds.
        alone: it is the only row of its sequence in the step, so that what it samples may be fed by the next one.
    """

    sequence: Sequence[ImageT]
    phase: Phase
    position: int
    rule: TokenRule = ANY_TOKEN
    value: FedValue | None = None
    alone: bool = True


@dataclass(slots=True, frozen=True)
class Step(Generic[ImageT]):
    """A launch: its rows, those of a sequence behind each other, and the requests of a prefill, in the same order.

    Attributes:
        kind: prefill or decode.
        number: from 1.
        sequences: its rows.
        requests: of a prefill.
        groups: the rows by sequence.
        drafted: whether any row feeds what the host says.
    """

    kind: StepKind
    number: int
    sequences: tuple[ScheduledSequence[ImageT], ...]
    requests: tuple[ImageRequest[ImageT], ...] = ()
    groups: abc.Sequence[list[ScheduledSequence[ImageT]]] = field(init=False)
    drafted: bool = field(init=False)

    def __post_init__(self) -> None:
        groups: list[list[ScheduledSequence[ImageT]]] = []
        last: object = None
        for row in self.sequences:
            if row.sequence is last:
                groups[-1].append(row)
            else:
                groups.append([row])
                last = row.sequence
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "drafted", any(row.value is not None for row in self.sequences))

    @property
    def writes_text(self) -> bool:
        """Whether any row samples a token: what it may be depends on the step ahead."""
        return any(row.phase in TEXT_PHASES for row in self.sequences)

    @property
    def imaged(self) -> list[ImageRequest[ImageT]]:
        """The requests with an image to encode; to be asked before the step is committed."""
        return [request for request in self.requests if request.image is not None]

    @property
    def images(self) -> list[ImageT]:
        """Their images."""
        return [request.image for request in self.requests if request.image is not None]
