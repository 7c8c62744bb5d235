"""The compose file of a GPU node and the lock of dependencies, compared to the program. tests/image has the rest."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from saccade.distribution import DISTRIBUTION
from saccade.pipeline.cli.main import app
from saccade.pipeline.config.file import load
from tests.support import REPO

NODE = REPO / "configs" / "gpu-node"
README = REPO / "docs" / "guides" / "workers.md"


def flags_of(command: list[str]) -> dict[str, str]:
    """The flags of a command and their values, which the program itself takes, but for a file that is not here."""
    assert command[0] == "run"
    filled = [re.sub(r"\$\{\w+:-(.*?)}", r"\1", word) for word in command]  # as Compose does
    saccade = typer.main.get_command(app)
    with saccade.make_context("saccade", filled) as context:
        name, run, rest = saccade.resolve_command(context, filled)
        with run.make_context(name, rest, parent=context) as parsed:
            given = {key: value for key, value in parsed.params.items() if value not in (None, [], ())}
    flags = {flag: after for flag, after in zip(command, [*command[1:], ""], strict=True) if flag.startswith("--")}
    assert {flag[2:].replace("-", "_") for flag in flags} <= given.keys()
    return flags


def test_the_node_s_compose_file_runs_workers_on_its_gpus() -> None:
    service = yaml.safe_load((NODE / "compose.yaml").read_text())["services"]["saccade"]
    assert flags_of(service["command"])["--workers"] == "${SACCADE_WORKERS:-2}"
    config = load(NODE / "cameras.yaml", {"workers": 2})
    assert config.http == "127.0.0.1:8080"
    assert len(config.each()) == 2
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    target = service["build"]["target"]
    assert re.search(rf"^FROM \S+ AS {target}$", (REPO / "Dockerfile").read_text(), re.MULTILINE)


def test_a_flag_that_the_program_does_not_have_is_found() -> None:
    with pytest.raises(typer.TyperException, match="--worker"):
        flags_of(["run", "--worker", "2"])
    with pytest.raises(typer.TyperException, match="valid integer"):
        flags_of(["run", "--workers", "many"])


def test_the_values_that_are_documented_are_the_chart_s() -> None:
    values = yaml.safe_load((REPO / "configs" / "helm" / "values.yaml").read_text())
    documented = set(re.findall(r"--set(?:-file)? (\w+)=", README.read_text()))
    assert documented
    assert documented <= values.keys()


def test_the_lock_names_a_version_of_each_dependency() -> None:
    """`make lock` after a change of the dependencies in pyproject.toml."""
    lock = Path(REPO / "requirements.lock").read_text()
    pins = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    locked = {canonicalize_name(name): Version(version) for name, version in pins}
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(one) for one in chain(project["dependencies"], *project["optional-dependencies"].values())]
    missing = [
        str(one)
        for one in wanted
        if canonicalize_name(one.name) not in {"torch", canonicalize_name(DISTRIBUTION)}
        and locked.get(canonicalize_name(one.name), Version("0")) not in one.specifier
    ]
    assert missing == []
