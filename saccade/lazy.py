"""Lets a package export names whose modules are imported only when a name is first used (PEP 562).

So results and errors can be had without torch, and the command line's help without either torch or FFmpeg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` for the package of that name.

    Args:
        package: its `__name__`.
        modules: names by the module, relative to the package, that has them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return get
