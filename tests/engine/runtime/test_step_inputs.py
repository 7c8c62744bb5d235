"""What the host writes for one slot is what the device has after that slot is sent."""

from __future__ import annotations

import numpy as np
import torch

from saccade.engine.runtime.step_inputs import Numbers


def test_each_slot_is_sent_whole_and_by_itself() -> None:
    numbers = Numbers(2, torch.device("cpu"), lanes=(3,), tables=(2, 4))
    lanes, tables = numbers.device["lanes"], numbers.device["tables"]
    numbers.host[0]["lanes"][:] = [1, 2, 3]
    numbers.host[0]["tables"][1, 2] = 9
    numbers.host[1]["lanes"][:2] = 7
    numbers.send(0)
    assert lanes.tolist() == [1, 2, 3]
    assert tables.tolist() == [[0, 0, 0, 0], [0, 0, 9, 0]]
    numbers.send(1)
    assert lanes.tolist() == [7, 7, 0], "the device's arrays stay where they are"
    assert not tables.any()
    assert lanes.dtype == torch.int32
    assert numbers.host[0]["lanes"].dtype == np.int32
