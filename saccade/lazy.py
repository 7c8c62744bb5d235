"""Lazy imports: a module is imported when one of its exported names is first used (PEP 562).

Commands such as `saccade --help` therefore start without importing torch and FFmpeg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` function for a package, which imports the exported names of the package lazily.

    Args:
        package: the package's `__name__`.
        modules: exported names by module, relative to the package.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return get
