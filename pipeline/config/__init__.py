"""The configuration of a run: the models of all settings (`run`, `stream`), and the YAML file (`file`, `edit`)."""

from saccade.pipeline.config.http import parse_place
from saccade.pipeline.config.prompts import Changes, Prompts, ShareSettings
from saccade.pipeline.config.run import STREAM, RunConfig, flags_of, takes_commas
from saccade.pipeline.config.stream import ListedStream, StreamConfig

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
