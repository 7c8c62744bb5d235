"""Speculative decoding: most answers are drafted, then verified in one step. No torch.

A frame shows nearly what the one before it did. The values of the last answer to a prompt are fed behind the prompt,
and the same step samples behind each of them. As long as what is sampled is what was fed, the answer is that of plain
decoding. The first value that differs is the right one, as all before it are right. What was sampled behind it is the
draft of the next step (Jacobi iteration; Santilli et al. 2023, arXiv:2305.10427), until all is right. Greedy answers
are therefore those of plain decoding. Drawn text is not drafted, as it is meant to differ.

A model whose vision encoder is a detector knows most of an answer before it is asked: there the draft is what the
detector has found, on any image (`FROM_IMAGE`). What lies behind the rows of the first step is the draft of the next.

A step's cost is reading weights and keys, whatever its rows, while these are few: a step has no more rows than the
engine has batch slots. A prompt whose drafts save few steps stops drafting for a while, twice as long each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import PrefillWindow, ScheduledSequence, Step
from saccade.engine.core.request import Sequence as Answer
from saccade.engine.models.protocol import Phase
from saccade.engine.tasks.output_state import FROM_IMAGE, FedValue, Sampled

Rows = list[ScheduledSequence[Any]]
"""Of one sequence in a step, in order."""


class Speculation:
    """Drafts the rows of steps, and verifies them.

    Args:
        config: the engine's.
        from_images: whether the executor drafts what is asked of an image that it encodes.

    Attributes:
        drafted, accepted, saved: values fed, those that were right, and decode steps of a sequence saved, so far.
    """

    def __init__(self, config: EngineConfig, *, from_images: bool = False) -> None:
        self._config, self._from_images = config, from_images
        self.drafted = self.accepted = self.saved = 0

    def first_rows(self, window: PrefillWindow[Any], left: int, *, certain: bool) -> Rows:
        """What a prefill samples of a window: behind each prompt, and behind each of at most `left` values of drafts.

        With `certain` what is certain to be fed is, whatever is left.
        """
        scheduled: Rows = []
        for sequence in window.sequences:
            phase = sequence.output.next_phase()
            if phase is None:
                raise ValueError("an output state that wants no step was scheduled")
            rows: Rows = [ScheduledSequence(sequence, phase, sequence.position)]
            sequence.position += len(sequence.prompt)
            if certain and (known := sequence.output.certain):
                _extend(rows, known)
            elif left > 0 and sequence.output.draftable:
                draft = () if sequence.memory is None else sequence.memory.draft()
                if self._from_images and window.image is not None and sequence.output.visible:
                    draft = (FROM_IMAGE,) * max(len(draft), self._config.image_draft)
                left -= self._draft(rows, draft[:left])
            scheduled += rows
        return scheduled

    def next_rows(self, sequence: Answer[Any], left: int) -> Rows:
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
            self._draft(rows, draft[: max(0, left)])
        return rows

    def take(self, rows: Sequence[ScheduledSequence[Any]], sampled: Sequence[Sampled]) -> bool:
        """Commit what a step has sampled for one sequence, as far as its draft was right; the rest is the next draft.

        Args:
            rows: of the sequence, in order.
            sampled: their values.

        Returns:
            Whether the answer is complete.
        """
        sequence = rows[0].sequence
        if len(rows) == 1:
            committed, complete = 1, sequence.output.commit(sampled[0])
        else:
            committed, complete = self._verify(rows, sampled)
        if sequence.drafted:
            self.accepted += committed - 1
        sequence.started = True
        sequence.committed += committed
        if complete and (sequence.drafted or sequence.memory is not None):
            plain = sequence.committed - 1  # decode steps: one for each value but the first
            saved = plain - sequence.decodes
            self.saved += max(0, saved)
            if sequence.memory is not None:
                pays = saved >= self._config.draft_worth * max(1, plain)
                paid = pays if sequence.drafted else None
                sequence.memory.learn(sequence.output.values(), paid, self._config.draft_pause)
        return complete

    def _draft(self, rows: Rows, draft: Sequence[FedValue]) -> int:
        """Add rows that feed a draft; how many."""
        drafted = _extend(rows, draft)
        rows[0].sequence.drafted += drafted
        self.drafted += drafted
        return drafted

    def _verify(self, rows: Sequence[ScheduledSequence[Any]], sampled: Sequence[Sampled]) -> tuple[int, bool]:
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
        if sequence.misses < self._config.draft_misses:
            for row, values in zip(rows[committed:], sampled[committed:], strict=True):
                value = output.fed(row.phase, values)
                if value is None:
                    break
                feed.append(value)
            else:
                feed += _found_values(sequence, sequence.committed + committed - 1 + len(feed))
        sequence.feed = tuple(feed)
        return committed, False


def drafted_from_images(step: Step[Any]) -> list[tuple[int, Rows]]:
    """The rows of each sequence of a prefill whose draft the executor finds, and the number of its image in the step.

    To be asked before the step is committed.
    """
    if not step.drafted or not step.windows:
        return []
    numbers = {window: number for number, window in enumerate(step.imaged)}
    return [
        (numbers[rows[0].sequence.window], rows)
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
