"""Speculative decoding: verifies all values of a drafted answer in one step.

Consecutive video frames are similar, so the last answer to a prompt is the draft of the next answer. The draft values
are appended to the prompt as decoder inputs, and one step samples a value after each draft value. A sample is accepted
if all draft values before it are equal to the samples. The samples after the first difference become the draft of the
next step (Jacobi iteration; Santilli et al. 2023, arXiv:2305.10427). Greedy answers are therefore the same as without
drafts. Text with a temperature above 0 is not drafted.

If the vision encoder of a model is an object detector, its detections are the draft (`FROM_IMAGE`). This also works for
single images.

A step with few rows takes about the same time as a step with one row. A step has at most as many rows as batch slots.
If the drafts of a prompt save too few steps, drafting is paused for that prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import PrefillWindow, ScheduledSequence, Step
from saccade.engine.core.request import Sequence as Answer
from saccade.engine.models.protocol import Phase
from saccade.engine.tasks.task import FROM_IMAGE, FedValue, Sampled

Rows = list[ScheduledSequence[Any]]
"""Rows of one sequence in a step, in order of position."""


class Speculation:
    """Adds draft values to batch steps, and verifies them against the samples (speculative decoding).

    Args:
        config: engine configuration.
        from_images: whether to use the vision encoder's detections as drafts.

    Attributes:
        drafted: total number of draft values.
        accepted: total number of draft values that were equal to the samples.
        saved: total number of decode steps that drafts have saved.
    """

    def __init__(self, config: EngineConfig, *, from_images: bool = False) -> None:
        self._config, self._from_images = config, from_images
        self.drafted = self.accepted = self.saved = 0

    def first_rows(self, window: PrefillWindow[Any], left: int, *, certain: bool) -> Rows:
        """Return the batch rows of a prefill window: one row per prompt and one per draft value (speculative decoding).

        Args:
            window: image or tile, with its prompts.
            left: maximum number of rows for draft values.
            certain: whether to add rows for the decoder inputs that are known in advance (`OutputState.certain`).
        """
        scheduled: Rows = []
        for sequence in window.sequences:
            phase = sequence.output.next_phase()
            if phase is None:
                raise ValueError("the scheduler planned a decoding step for a complete sequence")
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
        """Return the batch rows of a sequence in a decode step.

        The rows are one row for the next value, and at most `left` rows that verify draft values. The list is empty if
        the answer is complete.
        """
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
        """Verify the draft of a sequence (speculative decoding). Append the accepted samples to the answer.

        Args:
            rows: batch rows of the sequence, in order of position.
            sampled: sampled value of each row.

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
            plain = sequence.committed - 1  # decode steps without drafts: one for each value except the first
            saved = plain - sequence.decodes
            self.saved += max(0, saved)
            if sequence.memory is not None:
                pays = saved >= self._config.draft_worth * max(1, plain)
                paid = pays if sequence.drafted else None
                sequence.memory.learn(sequence.output.values(), paid, self._config.draft_pause)
        return complete

    def _draft(self, rows: Rows, draft: Sequence[FedValue]) -> int:
        """Append one batch row for each draft value. Return the number of appended rows."""
        drafted = _extend(rows, draft)
        rows[0].sequence.drafted += drafted
        self.drafted += drafted
        return drafted

    def _verify(self, rows: Sequence[ScheduledSequence[Any]], sampled: Sequence[Sampled]) -> tuple[int, bool]:
        """Verify a draft. Accepted samples are appended to the answer; the remaining samples become the next draft.

        Returns:
            The number of accepted samples, and whether the answer is complete.
        """
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
        assert right is not None, "an unfinished answer needs a next decoder input"
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
    """Return the sequences whose drafts are the detections in their image, each as (image index, batch rows).

    Call this function before `Scheduler.commit`.
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
    """Replace the placeholders (`FROM_IMAGE`) in the draft of a sequence by detected boxes.

    Placeholders without a box become zeros.

    Args:
        rows: batch rows of the sequence.
        objects: boxes in the order of the answer, each (unused, x, y, width, height) in normalized coordinates.
    """
    sequence = rows[0].sequence
    sequence.found = objects
    found = _found_values(sequence, 0, len(rows) - 1)
    for number, row in enumerate(rows[1:]):
        kind = Phase.SIZE if rows[number].phase is Phase.SIZE else Phase.Y
        row.value = found[number] if number < len(found) else (kind, 0.0, 0.0)


def _found_values(sequence: Answer[Any], start: int, count: int | None = None) -> list[FedValue]:
    """Convert detected boxes to decoder inputs. Return the inputs from index `start`, at most `count`."""
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
    """Append one batch row per value of `draft` until the answer is complete. Return the number of new rows."""
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
