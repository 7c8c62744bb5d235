"""What the host writes for one slot is what the device has after that slot is sent, or fetched."""

from __future__ import annotations

import numpy as np
import torch

from saccade.engine.core.request import PrefillWindow, ScheduledSequence, Sequence, Step, StepKind
from saccade.engine.models.protocol import Phase
from saccade.engine.runtime.step_inputs import DecodeInputs, PrefillInputs, StepInputs
from saccade.engine.tasks.objects import BoxesOutput
from saccade.engine.tasks.task import FedValue
from tests.support.engine.requests import request_of


def test_each_slot_is_sent_whole_and_by_itself() -> None:
    numbers = StepInputs(2, torch.device("cpu"), batch_slots=(3,), tables=(2, 4))
    batch_slots, tables = numbers.device["batch_slots"], numbers.device["tables"]
    numbers.host[0]["batch_slots"][:] = [1, 2, 3]
    numbers.host[0]["tables"][1, 2] = 9
    numbers.host[1]["batch_slots"][:2] = 7
    numbers.send(0)
    assert batch_slots.tolist() == [1, 2, 3]
    assert tables.tolist() == [[0, 0, 0, 0], [0, 0, 9, 0]]
    numbers.send(1)
    assert batch_slots.tolist() == [7, 7, 0], "the device's arrays stay where they are"
    assert not tables.any()
    assert batch_slots.dtype == torch.int32
    assert numbers.host[0]["batch_slots"].dtype == np.int32


def drafted(prompt: tuple[int, ...], slot: int, draft: list[FedValue], position: int) -> list[ScheduledSequence[int]]:
    sequence = Sequence[int](prompt, BoxesOutput(4, 0.5, 50), {1: (0.25,)} if len(prompt) > 2 else {})
    sequence.batch_slot, sequence.pages = slot, (10 + slot,)
    PrefillWindow(request_of(0, []), [sequence], 0, pages=(3, 4))
    rows = [ScheduledSequence(sequence, Phase.X_OR_EOS, position)]
    first = position + len(prompt)
    rows += [ScheduledSequence(sequence, Phase.Y, first + i, value=value) for i, value in enumerate(draft)]
    for row in rows:
        row.alone = not draft
    return rows


def test_a_prefill_has_each_draft_behind_its_prompt() -> None:
    inputs = PrefillInputs(
        1, torch.device("cpu"), rows=6, images=2, tokens=12, prefix_pages=2, pages=4, prefix_length=9
    )
    draft: list[FedValue] = [(Phase.Y, 0.5, 0.0), (Phase.SIZE, 0.125, 0.75), (Phase.TOKEN, 7.0, 0.0)]
    one, other = drafted((5, 6, 8), 2, draft, 9), drafted((5, 6), 4, [], 9)
    step = Step(StepKind.PREFILL, 1, (*one, *other), (one[0].sequence.window, other[0].sequence.window))
    tokens = inputs.fill(0, step)
    assert tokens.ids == [5, 6, 8, 0, 0, 0, 5, 6]
    assert tokens.positions.tolist() == [9, 10, 11, 12, 13, 14, 9, 10]
    assert tokens.owners.tolist() == [2] * 6 + [4] * 2
    sent = {name: array.tolist() for name, array in inputs.device.items()}
    assert sent["lasts"] == [2, 3, 4, 5, 7, 0]  # behind the prompt, and behind each value of the draft
    assert sent["kinds"] == [0, Phase.Y, 0, Phase.Y, Phase.SIZE, Phase.TOKEN, *[0] * 6]
    assert inputs.values[[1, 3, 4, 5]].tolist() == [[0.25, 0.0], [0.5, 0.0], [0.125, 0.75], [7.0, 0.0]]
    assert sent["batch_slots"] == [2, 4, 6, 6, 6, 6]
    assert sent["owners"][8:] == [6] * 4
    assert sent["tables"][:2] == [[3, 4, 12, 0], [3, 4, 14, 0]]
    assert sent["prefixes"] == [[3, 4], [3, 4]]


def test_a_decode_step_keeps_only_what_is_sampled_alone() -> None:
    inputs = DecodeInputs(1, torch.device("cpu"), rows=6, prefix_length=9)
    rows = [*drafted((5,), 2, [(Phase.Y, 0.5, 0.0)], 20), *drafted((5,), 3, [], 30)]
    rows[0].value = Phase.SIZE, 0.25, 0.5
    inputs.fill(0, rows, 4)
    assert not inputs.device["batch_slots"].any(), "they are fetched by the step's graph"
    inputs.fetch(0)
    sent = {name: array.tolist() for name, array in inputs.device.items()}
    assert sent["batch_slots"][:4] == [2, 2, 3, 6]
    assert sent["outs"][:4] == [6, 6, 3, 6]
    assert sent["positions"][:4] == [20, 21, 30, 9]
    assert sent["kinds"][:4] == [Phase.SIZE, Phase.Y, 0, 0]
    assert inputs.values[:2].tolist() == [[0.25, 0.5], [0.5, 0.0]]
