"""Quotas as Docker and Kubernetes set them, in files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade import processors

V2 = "0::/system.slice/app.service\n"
PERIOD = "cpu,cpuacct/docker/1f/cpu.cfs_period_us"
QUOTA = "cpu,cpuacct/docker/1f/cpu.cfs_quota_us"
V1 = "11:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {}, None),
        (V2, {"system.slice/app.service/cpu.max": "max 100000"}, None),
        (V2, {"system.slice/app.service/cpu.max": "150000 100000"}, 1.5),
        pytest.param(
            V2,
            {"system.slice/app.service/cpu.max": "400000 100000", "system.slice/cpu.max": "200000 100000"},
            2.0,
            id="a group above it allows less",
        ),
        pytest.param("0::/\n", {"cpu.max": "50000 100000"}, 0.5, id="cgroup namespace of a container"),
        pytest.param("0::/docker/1f\n", {"cpu.max": "300000 100000"}, 3.0, id="the host's path in a container"),
        (
            V1,
            {QUOTA: "-1", PERIOD: "100000"},
            None,
        ),
        (
            V1,
            {QUOTA: "250000", PERIOD: "100000"},
            2.5,
        ),
        pytest.param(
            V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0, id="mounted as cpu"
        ),
        (V2, {"system.slice/app.service/cpu.max": "not a quota"}, None),
    ],
)
def test_the_quota_is_the_least_of_all_groups(
    tmp_path: Path, own: str, files: dict[str, str], expected: float | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "fs").mkdir(exist_ok=True)
    assert processors.cgroup_quota(tmp_path / "fs", tmp_path / "own") == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (2.0, 2), (1.5, 1), (0.5, 1), (64.0, 8)])
def test_processors_are_those_of_the_mask_and_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(processors, "cgroup_quota", lambda: quota)
    assert processors.usable_processors() == expected


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert processors.cgroup_quota(tmp_path, tmp_path / "absent") is None
