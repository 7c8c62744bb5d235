"""Makes printing to standard output and standard error safe, for any encoding and for closed file descriptors."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from typing import Any

_LIKE = {
    "→": "->",
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "─": "-",
    "│": "|",
    "×": "x",
    "·": "-",
    "▶": ">",
    "°": " deg",
    "µ": "u",
    "’": "'",
    "“": '"',
    "”": '"',
}
"""ASCII replacements for characters in Saccade's messages that an encoding does not support."""
_ERRORS = "saccade.terminal"


def prepare_terminal() -> None:
    r"""Prepare standard output and standard error for any text. Open closed standard streams as the null device.

    A character that the encoding does not support is replaced by a similar character or by \uXXXX.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # otherwise the next opened file gets this descriptor and the output of C libraries
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    codecs.register_error(_ERRORS, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def json_text(value: Any) -> str:
    """Convert a value to indented JSON. If standard output is not UTF-8, non-ASCII characters are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return json.dumps(value, indent=2, ensure_ascii=not encoding.lower().startswith("utf"))


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_LIKE.get(one) or json.dumps(one)[1:-1] for one in text), error.end
