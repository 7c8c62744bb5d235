"""The project's name on a package index, where the package `saccade` is another project: no text installs that."""

from __future__ import annotations

import re
import tomllib

import yaml

from saccade.distribution import DISTRIBUTION, VERSION, install_command
from tests.support import REPO, listed, tracked

OTHERS_PACKAGE = re.compile(r"saccade\[|pip3? install\s+(-\S+\s+)*['\"]?saccade(?![\w-])")
"""The old form: the bare name with an extra, or installed by pip."""


def texts() -> dict[str, str]:
    found = {}
    for path in listed():
        if path.is_file() and not path.is_symlink() and path != REPO / "tests" / "test_distribution.py":
            try:
                found[str(path.relative_to(REPO))] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def test_the_old_form_is_recognised() -> None:
    for text in ("pip install 'saccade[ray]'", "`pip install saccade`", "pip install -U saccade", 'saccade[mqtt]"'):
        assert OTHERS_PACKAGE.search(text), text
    for text in (install_command("ray"), "pip install saccade-live", "pip install '/src/saccade-clone[ray]'"):
        assert not OTHERS_PACKAGE.search(text), text


def test_no_text_installs_the_package_of_another_project() -> None:
    assert [name for name, text in texts().items() if OTHERS_PACKAGE.search(text)] == []


def test_code_has_the_name_from_one_place() -> None:
    places = [path.relative_to(REPO) for path in tracked(".py") if DISTRIBUTION in path.read_text(encoding="utf-8")]
    assert [str(path) for path in places if path.parts[0] != "tests"] == ["saccade/distribution.py"]


def test_what_is_built_has_this_name_and_version() -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["name"] == DISTRIBUTION
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "saccade.distribution.VERSION"}
    chart = yaml.safe_load((REPO / "configs" / "helm" / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == VERSION


def test_named_extras_exist() -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"].keys()
    named = {
        extra
        for text in texts().values()
        for listed_extras in re.findall(rf"(?<!\w){DISTRIBUTION}\[([\w,-]+)\]|install_command\(['\"](\w+)['\"]\)", text)
        for extra in ",".join(listed_extras).split(",")
        if extra
    }
    assert named
    assert named <= extras
