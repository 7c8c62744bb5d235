"""`saccade rules check`: checks the rules of a configuration and lists them."""

from __future__ import annotations

from pathlib import Path

from saccade.pipeline.cli.commands.configs import check_labels
from saccade.pipeline.config.file import load


def check(path: Path) -> str:
    """Return a line for each rule of a file; the file needs no source.

    Raises:
        ConfigError: if a rule is wrong, with line, column and the expected input.
        EngineError: if a rule names a label that the model does not know.
    """
    lines = []
    config = load(path, {}, source="video.mp4")
    check_labels(config)
    for stream in config.each():
        named = f"{stream.name or stream.source}: " if stream.source != "video.mp4" else ""
        lines += [f"{named}{rule.name}: {rule.when}" for rule in stream.rules]
    count = len(lines)
    return "\n".join(
        [*lines, "no rules" if not count else "1 rule is valid" if count == 1 else f"{count} rules are valid"]
    )
