"""Declares configuration settings with `setting`, and defines field types that several settings use."""

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
    """Raised by a validator for an invalid setting, with the position of the error.

    Args:
        message: short message for the user.
        offset: position of the error in the value, as the number of characters before it.
        key: path of the invalid setting; None for the setting that is being validated.
    """

    def __init__(self, message: str, offset: int = 0, key: tuple[int | str, ...] | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        self.key = key


class NullIsUnset(BaseModel):
    """A pydantic model that treats null for an optional key as a missing key. Many HTTP clients send every key."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict) or None not in values.values():
            return values
        kept = {field.alias or name for name, field in cls.model_fields.items() if _keeps_null(field)}
        return {key: value for key, value in values.items() if value is not None or key in kept}


def _keeps_null(field: FieldInfo) -> bool:
    """Return whether null is kept as the value of a field. Otherwise, null counts as a missing key."""
    return field.is_required() or field.annotation is Any or type(None) in get_args(field.annotation)


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def read_seconds(value: object) -> object:
    """Convert a duration such as `90s`, `5m`, `2h`, `1d`, `1:30` or `0:01:30` to seconds.

    Numbers, and strings that are not durations, are returned unchanged.
    """
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", value.strip())):
        return float(found[1]) * _UNITS[found[2]]
    if isinstance(value, str) and re.fullmatch(r"(\d+:){1,2}\d+(\.\d+)?", value.strip()):
        total = 0.0
        for part in value.strip().split(":"):
            total = total * 60 + float(part)
        return total
    return value


def split_names(value: object) -> object:
    """Split a string of comma-separated names into a list. Remove spaces around each name."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple):
        return [item.strip() if isinstance(item, str) else item for item in value]
    return value


def as_list(value: object) -> object:
    """Wrap a string in a list. Return any other value unchanged."""
    return [value] if isinstance(value, str) else value


def read_number(value: object) -> object:
    """Convert an integer to a string. In YAML, a webcam index such as `0` is an integer."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def no_nul(value: str) -> str:
    """Check that a string contains no NUL character, and return it unchanged.

    Raises:
        ValueError: if the string contains a NUL character.
    """
    if "\0" in value:  # a path with a NUL character raises wherever it is used
        raise ValueError("a NUL character is not allowed in text")
    return value


def keep_bytes(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Validate a file name that contains bytes that are not valid UTF-8.

    Python represents such a byte as a lone surrogate (U+DC80 to U+DCFF), which pydantic rejects.
    """
    if isinstance(value, str) and any("\udc80" <= one <= "\udcff" for one in value):
        check(re.sub("[\udc80-\udcff]", "?", value))  # pydantic refuses such a text
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
    """Declare a field of a configuration.

    Args:
        default: default value; `...` for a required field.
        description: purpose of the setting in one line, also used as the help text of the flag.
        more: additional text for the manual.
        metavar: placeholder of the value in the help; default: the type.
        flags: command-line flags; default: the name of the field with dashes.
        env: environment variable for the value.
        constraints: see `pydantic.Field`.
    """
    extra: dict[str, Any] = {"more": more, "metavar": metavar, "flags": list(flags), "env": env}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def is_onvif(source: str) -> bool:
    """Return whether a source is the URL of an ONVIF camera."""
    # Does not import `sources`, because that import is slow.
    return source.strip().lower().startswith("onvif://")
