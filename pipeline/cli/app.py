"""A variant of Typer with a shorter help text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
import typer.core

C = TypeVar("C", bound=Callable[..., Any])


def _leave_types_out(parameters: list[Any]) -> list[Any]:
    for one in parameters:
        if isinstance(one, typer.core.TyperArgument):
            one.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
        elif one.is_flag and one.metavar is None:
            one.metavar = ""
        elif one.metavar is None:
            one.metavar = one.name.upper().replace("_", "-")
    return parameters


class _Command(typer.core.TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _leave_types_out(super().get_params(ctx))


class _Group(typer.core.TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _leave_types_out(super().get_params(ctx))


class App(typer.Typer):
    """A group of commands. The constructor accepts the same arguments as `typer.Typer`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[C], C]:
        """Register a command. The arguments are the same as for `typer.Typer.command`."""
        return super().command(name, **{"cls": _Command, **options})
