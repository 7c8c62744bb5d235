"""Drafts: an answer that is known already is checked in one step instead of being written step by step. No torch.

What a frame shows is nearly what the one before it did. The values of the last answer to a prompt are fed behind the
prompt, and the same step samples behind each of them. As long as what is sampled is what was fed, the answer is that of
one step after another; the first value that differs is the right one, as all before it are right. What was sampled
behind it is the draft of the next step (Jacobi iteration; Santilli et al. 2023, arXiv:2305.10427), until all is right.
Greedy answers are therefore those of plain decoding; drawn text is not drafted, as it is meant to differ.

A model whose vision encoder is a detector has most of an answer before it is asked: what it found is the draft then, on
any image (`FROM_IMAGE`; what lies behind the rows of the first step is that of the next).

A step's cost is reading weights and keys, whatever its rows, while these are few: a step has no more of them than the
engine has batch slots. A prompt whose drafts save few steps stops drafting for a while, twice as long each time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.engine.core.step import ImageRequest, ScheduledSequence, Step
from saccade.engine.core.step import Sequence as Answer
from saccade.engine.phase import Phase
from saccade.engine.tasks.output_state import FROM_IMAGE, DraftMemory, FedValue, Sampled

Rows = list[ScheduledSequence[Any]]
"""Of one sequence in a step, in order."""
Memory = dict[Hashable, DraftMemory]
"""What the answers of a stream have left, by what was asked."""

_MOST_REMEMBERED = 256  # prompts of a stream
_FROM_IMAGE = 6  # values that a prefill takes of an image's draft, two boxes, where the last answer was no longer
_MOST_MISSES = 4  # steps in a row that only correct one value, before the rest is written plainly


@dataclass(slots=True)
class DraftCounts:
    """What drafts have done so far: values fed, those that were right, and decode steps of a sequence saved."""

    drafted: int = 0
    accepted: int = 0
    saved: int = 0


def recall(request: ImageRequest[Any], memory: Memory) -> None:
    """Give a request's sequences what earlier answers to their prompts have left, unless their caller has done so."""
    for sequence in request.sequences:
        if sequence.memory is None and sequence.output.draftable:
            if len(memory) >= _MOST_REMEMBERED:
                memory.clear()
            key = _key(request, sequence)
            sequence.memory = memory.setdefault(key, DraftMemory())


def recall_from(request: ImageRequest[Any], drafts: Mapping[Hashable, object]) -> None:
    """Give a request's sequences what `remember` has kept of an earlier result."""
    for sequence in request.sequences:
        if sequence.output.draftable:
            kept = drafts.get(_key(request, sequence))
            sequence.memory = replace(kept) if isinstance(kept, DraftMemory) else DraftMemory()


def remember(requests: Iterable[ImageRequest[Any]]) -> dict[Hashable, DraftMemory]:
    """What the complete answers of an image leave for those of the next: plain values, which hold nothing else."""
    drafts: dict[Hashable, DraftMemory] = {}
    for request in requests:
        for sequence in request.sequences:
            if sequence.output.draftable:
                memory = sequence.memory
                kept = DraftMemory(tuple(sequence.output.values())) if memory is None else replace(memory)
                drafts[_key(request, sequence)] = kept
    return drafts


def _key(request: ImageRequest[Any], sequence: Answer[Any]) -> Hashable:
    # By the adapter's name: what is verified may come from another adapter, and a memory must not keep its weights.
    adapter = None if request.adapter is None else request.adapter.name
    return request.window, sequence.prompt, type(sequence.output).__name__, adapter


def first_rows(
    request: ImageRequest[Any], left: int, counts: DraftCounts, from_image: bool = False, certain: bool = True
) -> Rows:
    """What a prefill samples of a request: behind each prompt, and behind each of at most `left` values of drafts.

    With `from_image` the executor drafts what is asked of an image that it encodes; with `certain` what is certain to
    be fed is, whatever is left.
    """
    scheduled: Rows = []
    for sequence in request.sequences:
        phase = sequence.output.next_phase()
        if phase is None:
            raise ValueError("an output state that wants no step was scheduled")
        rows: Rows = [ScheduledSequence(sequence, phase, sequence.position)]
        sequence.position += len(sequence.prompt)
        if certain and (known := sequence.output.certain):
            _extend(rows, known)
        elif left > 0 and sequence.output.draftable:
            draft = () if sequence.memory is None else sequence.memory.draft()
            if from_image and request.image is not None and sequence.output.visible:
                draft = (FROM_IMAGE,) * max(len(draft), _FROM_IMAGE)
            left -= _draft(rows, draft[:left], counts)
        scheduled += rows
    return scheduled


def drafted_from_images(step: Step[Any]) -> list[tuple[int, Rows]]:
    """The rows of each sequence of a prefill whose draft the executor finds, and the number of its image in the step.

    To be asked before the step is committed.
    """
    if not step.drafted or not step.requests:
        return []
    numbers = {request: number for number, request in enumerate(step.imaged)}
    return [
        (numbers[rows[0].sequence.request], rows)
        for rows in step.groups
        if len(rows) > 1 and rows[1].value is FROM_IMAGE
    ]


def put_found(rows: Rows, objects: Sequence[Sequence[float]]) -> None:
    """Put what an executor has found in place of `FROM_IMAGE`, and zeros where there is no more of it.

    Args:
        rows: of a sequence.
        objects: what the answer is likely to say, in order: (any, x, y, width, height) of each object.
    """
    sequence = rows[0].sequence
    sequence.found = objects
    found = _found_values(sequence, 0, len(rows) - 1)
    for number, row in enumerate(rows[1:]):
        kind = Phase.SIZE if rows[number].phase is Phase.SIZE else Phase.Y
        row.value = found[number] if number < len(found) else (kind, 0.0, 0.0)


def _found_values(sequence: Answer[Any], start: int, count: int | None = None) -> list[FedValue]:
    """Values from `start` on that the answer feeds if it says what was found; few are asked for of 96 objects."""
    sizes = Phase.SIZE in sequence.output.phases
    each = 3 if sizes else 2
    first, values = start // each, list[FedValue]()
    last = None if count is None else -(-(start + count) // each)
    for _, x, y, width, height in sequence.found[first:last]:
        values += ((Phase.Y, x, 0.0), (Phase.Y, y, 0.0))
        if sizes:
            values.append((Phase.SIZE, width, height))
    skipped = start - first * each
    return values[skipped : None if count is None else skipped + count]


def next_rows(sequence: Answer[Any], left: int, counts: DraftCounts) -> Rows:
    """What a decode step feeds of a sequence: one row, and at most `left` of a draft; none if it is complete."""
    phase = sequence.output.next_phase()
    if phase is None:
        return []
    sequence.position -= sequence.output.back
    rows: Rows = [ScheduledSequence(sequence, phase, sequence.position)]
    sequence.position += 1
    sequence.decodes += 1
    if sequence.feed:
        rows[0].value, *draft = sequence.feed
        sequence.feed = ()
        _draft(rows, draft[: max(0, left)], counts)
    return rows


def take(rows: Sequence[ScheduledSequence[Any]], sampled: Sequence[Sampled], counts: DraftCounts) -> bool:
    """Commit what a step has sampled for one sequence, as far as its draft was right; the rest is the next draft.

    Args:
        rows: of the sequence, in order.
        sampled: their values.
        counts: of all drafts.

    Returns:
        Whether the answer is complete.
    """
    sequence = rows[0].sequence
    committed, complete = (1, sequence.output.commit(sampled[0])) if len(rows) == 1 else _verify(rows, sampled)
    if sequence.drafted:
        counts.accepted += committed - 1
    sequence.started = True
    sequence.committed += committed
    if complete and (sequence.drafted or sequence.memory is not None):
        plain = sequence.committed - 1  # decode steps: one for each value but the first
        saved = plain - sequence.decodes
        counts.saved += max(0, saved)
        if sequence.memory is not None:
            sequence.memory.learn(sequence.output.values(), sequence.drafted, saved / max(1, plain))
    return complete


def _draft(rows: Rows, draft: Sequence[FedValue], counts: DraftCounts) -> int:
    """Add rows that feed a draft; how many."""
    drafted = _extend(rows, draft)
    rows[0].sequence.drafted += drafted
    counts.drafted += drafted
    return drafted


def _extend(rows: Rows, draft: Sequence[FedValue]) -> int:
    """Add rows that feed values behind a sequence's first row, as far as the answer can be so long; how many."""
    sequence = rows[0].sequence
    for number, value in enumerate(draft):
        phase = sequence.output.next_phase()
        if phase is None:
            break
        rows.append(ScheduledSequence(sequence, phase, sequence.position + number, value=value))
    drafted = len(rows) - 1
    for row in rows:
        row.alone = not drafted
    sequence.verifying = drafted > 0
    return drafted


def _verify(rows: Sequence[ScheduledSequence[Any]], sampled: Sequence[Sampled]) -> tuple[int, bool]:
    """How many rows were committed, and whether the answer is complete."""
    sequence = rows[0].sequence
    output = sequence.output
    right: FedValue | None = None
    committed = 0
    for number, (row, values) in enumerate(zip(rows, sampled, strict=True)):
        committed += 1
        if output.commit(values):
            return committed, True
        right = output.fed(row.phase, values)
        if number + 1 < len(rows) and rows[number + 1].value != right:
            break
    assert right is not None, "an answer that goes on feeds what it has sampled"
    output.retract(len(rows) - committed)
    first = rows[0].position if sequence.started else rows[0].position + len(sequence.prompt) - 1
    sequence.position = first + committed
    sequence.verifying = False
    sequence.misses = sequence.misses + 1 if committed == 1 else 0
    feed = [right]
    if sequence.misses < _MOST_MISSES:
        for row, values in zip(rows[committed:], sampled[committed:], strict=True):
            value = output.fed(row.phase, values)
            if value is None:
                break
            feed.append(value)
        else:
            feed += _found_values(sequence, sequence.committed + committed - 1 + len(feed))
    sequence.feed = tuple(feed)
    return committed, False
