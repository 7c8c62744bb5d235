"""Parsers for command-line flags of the developer benchmarks."""

from __future__ import annotations

import re

from saccade.pipeline.errors import ConfigError


def parse_small(text: str, flag: str, most: int) -> list[int]:
    """Parse a comma-separated list of integers, such as `0,2`.

    Args:
        text: the list.
        flag: name of the flag, for the error message.
        most: highest allowed integer; the lowest is 0.

    Raises:
        ConfigError: if the text is invalid.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,3}", part) and int(part) <= most for part in parts):
        raise ConfigError(f"{flag}: should be integers from 0 to {most} separated by commas, such as 0,2, got {text!r}")
    return [int(part) for part in parts]
