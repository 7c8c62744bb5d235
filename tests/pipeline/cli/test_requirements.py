"""The doctor checks what the project declares: every dependency, and those of extras as useful."""

from __future__ import annotations

import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from saccade.pipeline.cli import requirements
from saccade.pipeline.cli.commands import doctor
from saccade.pipeline.cli.requirements import Dependency, dependencies
from tests.support import REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def test_every_declared_dependency_is_checked() -> None:
    declared = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert {one.requirement.name for one in dependencies() if not one.extra} == declared
    extras = {name: {Requirement(one).name for one in all_} for name, all_ in PROJECT["optional-dependencies"].items()}
    del extras["dev"]
    found: dict[str, set[str]] = {}
    for one in dependencies():
        if one.extra:
            found.setdefault(one.extra, set()).add(one.requirement.name)
    assert found == extras


@pytest.mark.parametrize("one", dependencies(), ids=lambda one: one.requirement.name)
def test_each_is_imported_by_a_name_that_it_has(one: Dependency) -> None:
    try:
        metadata.version(one.requirement.name)
    except metadata.PackageNotFoundError:
        pytest.skip("not installed here")
    assert one.check()[0].isdigit()


def test_the_installed_metadata_are_read_without_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["lark>=1.2", 'aiomqtt>=2; extra == "mqtt"', 'pytest>=8; extra == "dev"', 'lap; sys_platform == "none"']
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    monkeypatch.setattr(requirements, "DISTRIBUTION", "another")
    assert [(one.requirement.name, one.extra) for one in dependencies()] == [("lark", ""), ("aiomqtt", "mqtt")]


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [("opencv-python", "4.9"), ("opencv-python-headless", "4.9 (opencv-python-headless)"), ("", "version unknown")],
)
def test_any_build_of_opencv_will_do(monkeypatch: pytest.MonkeyPatch, installed: str, wanted: str) -> None:
    class Distribution:
        name, version = installed, "4.9"

    def only(name: str) -> Distribution:
        if name != installed:
            raise metadata.PackageNotFoundError(name)
        return Distribution()

    monkeypatch.setattr(metadata, "distribution", only)
    monkeypatch.setattr(requirements, "_owners", lambda: {"cv2": [installed]})
    assert Dependency(Requirement("opencv-python>=4.9"), "").check() == wanted


def test_what_is_missing_or_too_old_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    missing, old = Requirement("no-such-thing>=1"), Requirement("lark>=999")
    broken = [Dependency(missing, ""), Dependency(missing, "mqtt"), Dependency(old, "")]
    monkeypatch.setattr(doctor, "dependencies", lambda: broken)
    found = doctor.examine()
    next(found)  # Python's version
    told = [next(found) for _ in broken]
    assert [(one.ok, one.needed) for one in told] == [(False, True), (False, False), (False, True)]
    assert told[0].detail == "No module named 'no_such_thing'"
    assert told[1].detail == "No module named 'no_such_thing'; pip install 'saccade-live[mqtt]'"
    assert told[2].detail.endswith("is installed, but >=999 is required")
