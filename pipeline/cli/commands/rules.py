"""The command `saccade rules`: checks and lists the rules of a configuration, and converts a sentence to a rule."""

from __future__ import annotations

from pathlib import Path

from saccade.pipeline.cli.commands.backtest import choose_stream
from saccade.pipeline.cli.commands.configs import check_labels
from saccade.pipeline.cli.commands.draft import draft, draft_text
from saccade.pipeline.config.file import load


def check(path: Path) -> str:
    """Check the rules of a configuration file, and return one line per rule. The file needs no source.

    Raises:
        ConfigError: if a rule is invalid. The message contains the line and column of the error.
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


def draft_for(sentence: str, path: Path | None, stream: str | None) -> str:
    """Convert an English sentence to a rule, check the rule, and return it as YAML.

    Args:
        sentence: the sentence.
        path: configuration file with zones and lines, or None.
        stream: name of the stream whose zones and lines are used; required if the file has several streams.

    Raises:
        ConfigError: if the sentence cannot be converted to a valid rule, or the file cannot be used.
        EngineError: if the model does not know the label.
    """
    config = load(path, {"detect": "person"}, source="video.mp4")
    regions = choose_stream(config.each(), stream)
    rule = draft(sentence, regions.zones, regions.lines)
    check_labels(config.model_copy(update={"source": "", "streams": [regions.model_copy(update={"rules": [rule]})]}))
    return draft_text(rule, regions.zones, regions.lines)
