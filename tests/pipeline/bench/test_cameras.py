from __future__ import annotations

import json

import pytest

from saccade.pipeline.bench.cameras.report import fair_shares, jain
from saccade.pipeline.bench.common import parse_range, parse_weights
from saccade.pipeline.errors import ConfigError
from tests.support.command import run_saccade


def test_cameras_that_offer_too_much_are_measured() -> None:
    flags = ["--streams", 6, "--fps", "10-30", "--seconds", 3, "--weights", "1,2", "--deadline-ms", 2000, "--json"]
    done = run_saccade("bench", "cameras", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert (seen["model"], seen["device"], len(seen["rows"])) == ("nano", "cpu", 6)
    assert {row["name"] for row in seen["rows"]} >= {"freezes", "bursts", "4K"}
    for row in seen["rows"]:
        assert row["looks"] + sum(row["dropped"].values()) == row["offered"] > 0
        assert set(row["dropped"]) <= {"superseded", "deadline"}
    assert sum(row["dropped"].get("superseded", 0) for row in seen["rows"]) > 0
    assert 0 < seen["launch_p50_ms"] <= seen["result_p50_ms"] <= seen["result_p99_ms"]
    assert 0 < seen["jain"] <= 1
    assert seen["fps"] < seen["offered_fps"]


@pytest.mark.parametrize(
    ("offered", "weights", "total", "wanted"),
    [
        ([100, 100], [1, 1], 10, [5, 5]),
        ([100, 100], [1, 4], 10, [2, 8]),
        ([2, 100, 100], [1, 1, 1], 12, [2, 5, 5]),
        ([1, 3, 100], [1, 1, 2], 12, [1, 3, 8]),
        ([1, 1], [1, 1], 5, [1, 1]),
        ([4], [1], 0, [0]),
    ],
)
def test_a_fair_share_is_no_more_than_what_was_offered(
    offered: list[float], weights: list[float], total: float, wanted: list[float]
) -> None:
    assert fair_shares(offered, weights, total) == pytest.approx(wanted)


def test_jain_s_index() -> None:
    assert (jain([3, 3, 3]), jain([1, 0, 0, 0])) == (1, 0.25)


@pytest.mark.parametrize("text", ["", "0", "30-5", "5-", "a-b", "5-30-60", "-5", "1-2000"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 15 or 5-30"):
        parse_range(text, "--fps")


@pytest.mark.parametrize("text", ["", "0", "1,,2", "a", "1000"])
def test_weights_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 1,1,4"):
        parse_weights(text, "--weights")


def test_what_is_read() -> None:
    assert (parse_range("5-30", "--fps"), parse_range("7.5", "--fps")) == ((5, 30), (7.5, 7.5))
    assert parse_weights("1, 0.5,4", "--weights") == [1, 0.5, 4]
