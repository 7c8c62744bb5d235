"""What the host writes for one slot is what the device has after that slot is sent."""

from __future__ import annotations

import numpy as np
import torch

from saccade.engine.runtime.step_inputs import StepInputs


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
