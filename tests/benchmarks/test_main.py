"""`python -m benchmarks …` as it is typed."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support import REPO
from tests.support.command import run_saccade


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_saccade(*arguments, module="benchmarks", cwd=REPO)


def test_prompts_are_timed() -> None:
    small = ["--prompts", "1", "--rounds", "1", "--size", "64x36", "--device", "cpu", "--dtype", "bfloat16", "--json"]
    done = benchmarks("prompts", *small)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"model": "nano", "device": "cpu", "dtype": "bfloat16"}.items() <= json.loads(done.stdout).items()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prompts", "--dtype", "int4"], "bfloat16, float16, fp8"),
        (["pipeline", "--dtype", "int4"], "'fp8', got 'int4'"),
        (["decode", "--device", "cpu"], "needs a GPU"),
    ],
)
def test_what_cannot_be_timed_is_one_line(arguments: list[str], said: str) -> None:
    done = benchmarks(*arguments)
    assert done.returncode != 0
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
