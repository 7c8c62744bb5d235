"""The settings of a run (`run`, `stream`), and the YAML file that contains them (`file`, `edit`)."""

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
