"""What the distribution needs, as it says itself: in `pyproject.toml` of a checkout, else in its installed metadata."""

from __future__ import annotations

import importlib
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import saccade
from saccade.distribution import DISTRIBUTION, install_command

OTHER_BUILDS = {
    "opencv-python": ("opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
}
"""Distribution → others that bring the same module."""

_MODULES = {"opencv-python": "cv2"}  # of what may be built from source, without metadata

_EXTRA = re.compile(r'extra == "([\w.-]+)"')
_FOR_DEVELOPERS = ("dev",)


@dataclass(slots=True, frozen=True)
class Dependency:
    """A distribution that is needed.

    Attributes:
        requirement: its name and versions.
        extra: the extra that it is for; "" if every run needs it.
    """

    requirement: Requirement
    extra: str

    def check(self) -> str:
        """The installed version, after an import; with a name, that of another build.

        Raises:
            ImportError: if it is not installed, or its module cannot be imported.
            RuntimeError: if the version is another than required.
        """
        name = self.requirement.name
        found = _installed(name)
        if found is None:
            importlib.import_module(_MODULES.get(name, name.replace("-", "_")))
            return "version unknown"
        importlib.import_module(_module_of(found, name))
        if not self.requirement.specifier.contains(found.version, prereleases=True):
            raise RuntimeError(f"{found.version} is installed, {self.requirement.specifier} is required")
        return found.version + ("" if canonicalize_name(found.name) == canonicalize_name(name) else f" ({found.name})")

    @property
    def remedy(self) -> str:
        """The command that installs it, of an extra; else ""."""
        return install_command(self.extra) if self.extra else ""


def dependencies() -> list[Dependency]:
    """All but those of developers, in the order in which they are declared."""
    found = []
    for text in _declared():
        requirement = Requirement(text)
        extra = _EXTRA.search(str(requirement.marker))
        name = extra[1] if extra else ""
        if name not in _FOR_DEVELOPERS and (requirement.marker is None or requirement.marker.evaluate({"extra": name})):
            found.append(Dependency(requirement, name))
    return found


def _declared() -> list[str]:
    """Requirements as metadata has them: with the extra in a marker."""
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


def _module_of(found: metadata.Distribution, name: str) -> str:
    """The module whose import shows that a distribution works: of its own name, or the first that it brings."""
    mine = {
        module
        for module, owners in metadata.packages_distributions().items()
        if canonicalize_name(found.name) in map(canonicalize_name, owners) and not module.startswith("_")
    }
    plain = name.replace("-", "_")
    if plain in mine or plain.partition(".")[0] in mine:
        return plain
    return min(mine, default=plain)
