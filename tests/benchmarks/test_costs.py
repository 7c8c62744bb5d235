from __future__ import annotations

import pytest

from benchmarks.costs import MoondreamCosts
from saccade.engine.models.moondream.config import MoondreamConfig


def test_a_step_reads_the_experts_that_its_rows_use() -> None:
    costs = MoondreamCosts(MoondreamConfig.from_dict({"text": {"moe": {}}}))
    one = costs.decode_bytes(1, 760, "bfloat16")
    assert one == costs.decode_bytes(1, 760, "bfloat16", 8) == pytest.approx(3.27e9, rel=0.02)
    cache = 760 * 24 * 2 * 2048 * 2
    assert costs.decode_bytes(8, 760, "bfloat16", 8) == one + 7 * cache
    assert one - costs.decode_bytes(1, 760, "bfloat16", kv_dtype="fp8") == cache - 760 * 24 * 2 * 32 * (64 + 2)
    more = costs.decode_bytes(32, 760, "bfloat16") - costs.decode_bytes(32, 760, "bfloat16", 8)
    assert more == pytest.approx(20 * 55.1 * 3 * 2048 * 1024 * 2, rel=0.01)
