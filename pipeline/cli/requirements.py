"""The dependencies of the package.

In a source checkout, they are read from `pyproject.toml`, otherwise from the metadata of the installed package.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import saccade
from saccade.distribution import DISTRIBUTION, install_command

OTHER_BUILDS = {
    "opencv-python": ("opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
}
"""For each distribution, other distributions that provide the same module."""

_MODULES = {"opencv-python": "cv2"}  # distributions that may be built from source, without metadata

_EXTRA = re.compile(r'extra == "([\w.-]+)"')
_FOR_DEVELOPERS = ("dev",)


@dataclass(slots=True, frozen=True)
class Dependency:
    """A Python distribution that the package requires.

    Attributes:
        requirement: name and version specifier.
        extra: name of the extra that needs the distribution; empty if every run needs it.
    """

    requirement: Requirement
    extra: str

    def check(self) -> str:
        """Import the distribution and return its version.

        If another build is installed, its name follows the version, such as "4.10.0 (opencv-python-headless)".

        Raises:
            ImportError: if the distribution is not installed, or its module cannot be imported.
            RuntimeError: if the installed version does not meet the requirement.
        """
        name = self.requirement.name
        found = _installed(name)
        if found is None:
            importlib.import_module(_MODULES.get(name, name.replace("-", "_")))
            return "version unknown"
        importlib.import_module(_module_of(found, name))
        if not self.requirement.specifier.contains(found.version, prereleases=True):
            raise RuntimeError(f"{name} {found.version} is installed, but {self.requirement.specifier} is required")
        return found.version + ("" if canonicalize_name(found.name) == canonicalize_name(name) else f" ({found.name})")

    @property
    def remedy(self) -> str:
        """The command that installs the distribution; empty if no extra contains the distribution."""
        return install_command(self.extra) if self.extra else ""


def dependencies() -> list[Dependency]:
    """Return the dependencies of Saccade, without developer tools, in the order in which they are declared."""
    found = []
    for text in _declared():
        requirement = Requirement(text)
        extra = _EXTRA.search(str(requirement.marker))
        name = extra[1] if extra else ""
        if name not in _FOR_DEVELOPERS and (requirement.marker is None or requirement.marker.evaluate({"extra": name})):
            found.append(Dependency(requirement, name))
    return found


def _declared() -> list[str]:
    """Return the requirements as strings, such as `mcp; extra == "mcp"` for a requirement of the extra "mcp"."""
    if (file := Path(saccade.__file__).resolve().parents[1] / "pyproject.toml").is_file():
        project = tomllib.loads(file.read_text()).get("project", {})
        if project.get("name") == DISTRIBUTION:
            extras = project.get("optional-dependencies", {}).items()
            return [*project["dependencies"], *(f'{one}; extra == "{name}"' for name, all_ in extras for one in all_)]
    return metadata.requires(DISTRIBUTION) or []


def _installed(name: str) -> metadata.Distribution | None:
    for one in (name, *OTHER_BUILDS.get(name, ())):
        with suppress(metadata.PackageNotFoundError):
            return metadata.distribution(one)
    return None


@cache  # the search takes 0.3 s
def _owners() -> Mapping[str, list[str]]:
    """Map each top-level module to the distributions that provide it."""
    return metadata.packages_distributions()


def _module_of(found: metadata.Distribution, name: str) -> str:
    """Return the name of a module of a distribution, preferably the module with the name of the distribution."""
    mine = {
        module
        for module, owners in _owners().items()
        if canonicalize_name(found.name) in map(canonicalize_name, owners) and not module.startswith("_")
    }
    plain = name.replace("-", "_")
    if plain in mine or plain.partition(".")[0] in mine:
        return plain
    return min(mine, default=plain)
