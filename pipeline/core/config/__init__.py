"""The configuration of a run: every setting, and the YAML file that has them (`config.file`, `config.edit`)."""

from saccade.pipeline.core.config.http import parse_place
from saccade.pipeline.core.config.prompts import Changes, Prompts, ShareSettings
from saccade.pipeline.core.config.run import STREAM, RunConfig, flags_of, takes_commas
from saccade.pipeline.core.config.stream import ListedStream, StreamConfig

__all__ = [
    "STREAM",
    "Changes",
    "ListedStream",
    "Prompts",
    "RunConfig",
    "ShareSettings",
    "StreamConfig",
    "flags_of",
    "parse_place",
    "takes_commas",
]
