"""Makes standard output and error safe to print to, whatever their encoding is and whether they are open."""

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
"""Characters of our own messages, and what they are where the encoding lacks them."""
_ERRORS = "saccade.terminal"


def prepare_terminal() -> None:
    r"""Have every text printable, and the numbers 0 to 2 taken by no other file.

    A character that the encoding lacks is written as one like it, or as \uXXXX. A closed standard error goes nowhere:
    print() would write its lines to standard output. A closed standard output stays None: print() ignores it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # else the first file that is opened gets this number, and what C libraries print
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    codecs.register_error(_ERRORS, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def json_text(value: Any) -> str:
    """Indented JSON to print: readable where standard output is UTF-8, else with escapes, and always the same value."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return json.dumps(value, indent=2, ensure_ascii=not encoding.lower().startswith("utf"))


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_LIKE.get(one) or json.dumps(one)[1:-1] for one in text), error.end
