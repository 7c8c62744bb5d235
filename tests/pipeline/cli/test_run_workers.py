from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from saccade.distribution import install_command
from saccade.pipeline.config import RunConfig
from saccade.pipeline.run import _ray
from tests.support.command import Command

_SET = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness")


@pytest.mark.parametrize(("flags", "named"), [(["--workers", "2"], "--workers"), (["--ray", "auto"], "--ray")])
def test_the_extra_is_named_where_ray_is_missing(
    flags: list[str], named: str, tmp_path: Path, saccade: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    bringing = ("control.ray", "control.ray_cluster", "control.stores", "worker")
    for module in {f"saccade.pipeline.{name}" for name in bringing} & sys.modules.keys():
        monkeypatch.delitem(sys.modules, module)
    for name in _SET:
        monkeypatch.setenv(name, "")  # so that the test's end takes them back
    done = saccade("run", "rtsp://127.0.0.1:9/x", "--detect", "person", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [f"saccade: {named} needs Ray: {install_command('ray')}"]


def test_a_file_that_is_not_there_is_told_before_ray_starts(
    tmp_path: Path, saccade: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = pytest.importorskip("saccade.pipeline.control.ray_run", reason="the extra `ray` is not installed")
    monkeypatch.setattr(cluster, "RayCluster", None)
    for name in _SET:
        monkeypatch.setenv(name, "")
    done = saccade("run", "none.mp4", "--detect", "person", "--workers", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["saccade: no such file: none.mp4"]


def test_each_run_of_a_process_has_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads the token once: with another token, the second run could not connect ("Failed to start GCS")."""
    pytest.importorskip("saccade.pipeline.control.ray_run", reason="the extra `ray` is not installed")
    for name in _SET:
        monkeypatch.setenv(name, "")
    tokens = []
    for _ in range(2):
        _ray(RunConfig.model_validate({"source": "rtsp://127.0.0.1:9/x", "detect": ["person"], "workers": 2}))
        tokens.append(os.environ["RAY_AUTH_TOKEN"])
    assert len(tokens[0]) == 64
    assert tokens[0] == tokens[1]
