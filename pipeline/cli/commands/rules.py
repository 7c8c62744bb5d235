"""`saccade rules check`: reads the rules of a configuration, and says what they are or where one is wrong."""

from __future__ import annotations

from pathlib import Path

from saccade.pipeline.cli.commands.configs import check_labels
from saccade.pipeline.config.file import load


def check(path: Path) -> str:
    """Every rule of a file, stream by stream; the file needs no source.

    Raises:
        ConfigError: if one is wrong, with line, column and what was expected.
        EngineError: if one names what the model does not know.
    """
    lines = []
    config = load(path, {}, source="video.mp4")
    check_labels(config)
    for stream in config.each():
        named = f"{stream.name or stream.source}: " if stream.source != "video.mp4" else ""
        lines += [f"{named}{rule.name}: {rule.when}" for rule in stream.rules]
    count = len(lines)
    return "\n".join(
        [*lines, "no rules" if not count else "1 rule is fine" if count == 1 else f"{count} rules are fine"]
    )
