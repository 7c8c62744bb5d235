"""How a setting of a configuration is declared, and the types that several of them have. Knows no setting itself."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo


class PlacedError(ValueError):
    """A mistake at a place inside a text, or in a setting that another one names.

    Args:
        message: half a line for the user.
        offset: where in the text, in characters from its beginning.
        key: the path of the setting, if it is not the one that is being validated.
    """

    def __init__(self, message: str, offset: int = 0, key: tuple[int | str, ...] | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        self.key = key


class NullIsUnset(BaseModel):
    """A model whose optional keys take null as if they were left out: many clients send every key that they know."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict) or None not in values.values():
            return values
        kept = {field.alias or name for name, field in cls.model_fields.items() if _keeps_null(field)}
        return {key: value for key, value in values.items() if value is not None or key in kept}


def _keeps_null(field: FieldInfo) -> bool:
    """Whether null is a value of its own, or a mistake because the key must be given."""
    return field.is_required() or field.annotation is Any or type(None) in get_args(field.annotation)


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def read_seconds(value: object) -> object:
    """Read `90`, `90s`, `5m`, `2h`, `1d`, `1:30` or `0:01:30` as seconds; leave anything else to the validator."""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", value.strip())):
        return float(found[1]) * _UNITS[found[2]]
    if isinstance(value, str) and re.fullmatch(r"(\d+:){1,2}\d+(\.\d+)?", value.strip()):
        total = 0.0
        for part in value.strip().split(":"):
            total = total * 60 + float(part)
        return total
    return value


def split_names(value: object) -> object:
    """Read one name, or several with commas between them, as a list."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple):
        return [item.strip() if isinstance(item, str) else item for item in value]
    return value


def as_list(value: object) -> object:
    """Read one text as a list of it."""
    return [value] if isinstance(value, str) else value


def read_number(value: object) -> object:
    """Read a number, as YAML has that of a webcam, as its text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def no_nul(value: str) -> str:
    """Return `value`.

    Raises:
        ValueError: if it has a NUL character in it.
    """
    if "\0" in value:  # which would end a path, and raise wherever one is used
        raise ValueError("should have no NUL character in it")
    return value


def keep_bytes(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Check a name that may have bytes in it that are not UTF-8, each as Python has it: U+DC80 to U+DCFF."""
    if isinstance(value, str) and any("\udc80" <= one <= "\udcff" for one in value):
        check(re.sub("[\udc80-\udcff]", "?", value))  # pydantic takes no such text
        return value
    return check(value)


Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(no_nul)]
FileText = Annotated[Text, WrapValidator(keep_bytes)]
"""The name of a file or folder, or an address."""
Address = Annotated[FileText, BeforeValidator(read_number)]
Names = Annotated[list[Text], BeforeValidator(split_names), Field(max_length=64)]
Questions = Annotated[list[Text], BeforeValidator(as_list), Field(max_length=64)]
SkillText = Annotated[str, Field(pattern=r"^\s*[a-z_]+\s*=\s*\S", max_length=4096), AfterValidator(no_nul)]
Seconds = Annotated[float, BeforeValidator(read_seconds), Field(ge=0, allow_inf_nan=False)]


def setting(
    default: Any,
    description: str,
    *,
    more: str = "",
    metavar: str | None = None,
    flags: tuple[str, ...] = (),
    env: str | None = None,
    **constraints: Any,
) -> Any:
    """A field of a configuration.

    Args:
        default: its value where none is given; `...` for a field that must be given.
        description: what it is for, in one line; the help of its flag.
        more: further text for the manual.
        metavar: the placeholder of its value in the help; by default its type.
        flags: its command-line flags, if not its name with dashes.
        env: the environment variable that gives it.
        constraints: as `pydantic.Field` takes them.
    """
    extra: dict[str, Any] = {"more": more, "metavar": metavar, "flags": list(flags), "env": env}
    return Field(default, description=description, json_schema_extra=extra, **constraints)
