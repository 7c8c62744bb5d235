"""The manual of every setting, as a YAML file that is a valid configuration: made from the settings' own declarations.

`saccade configs manual` prints it; configs/manual.yaml is a copy of it.
"""

from __future__ import annotations

import textwrap

import yaml

from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.core.config import RunConfig, flags_of
from saccade.pipeline.core.config.cluster import ClusterSettings
from saccade.pipeline.events.settings import EventSettings

_WIDTH = 120
_HEADER = """\
# Every setting, with its default: the manual, made by `saccade configs manual`, and a configuration that runs.
#
#     saccade run --config configs/manual.yaml holiday.mp4 --detect dog --out dog.mp4
#
# Each key is also a flag of `saccade run`, which wins over the file. Paths are relative to the directory in which the
# command is run. Keys that are left out keep the value shown here, but for `source`, which is needed, and detect, point
# and query, of which at least one is.
"""
_SECTIONS = {
    "what to watch": ["source", "streams", "name", "vid_stride", "start", "end", "hwaccel"],
    "how cameras are reached": ["rtsp_transport", "loss", "tls"],
    "what to find": ["detect", "point", "query", "task", "conf", "max_objects", "tiles", "stages", "gates"],
    "over time": list(AnalyticsSettings.model_fields),
    "events": [*EventSettings.model_fields, "ask", "store", "store_keep", "store_max_gb"],
    "with what": ["model", "device", "dtype", "in_flight", "queue", "weight", "max_fps", "deadline_ms"],
    "on several processes": ["workers", *ClusterSettings.model_fields],
    "where results go": ["out", "jsonl", "sinks", "display"],
}
_LAST_SECTION = "what other programs can ask"
_EXAMPLES = {"source": "pipeline/assets/demo.mp4", "detect": ["person"]}


def manual() -> str:
    """The text of the manual."""
    listed = {key for keys in _SECTIONS.values() for key in keys}
    sections = {**_SECTIONS, _LAST_SECTION: [key for key in RunConfig.model_fields if key not in listed]}
    parts = [_HEADER]
    for heading, keys in sections.items():
        parts.append(f"# ---- {heading}\n")
        parts += [_entry(key) for key in keys]
    return "\n".join(parts)


def _entry(key: str) -> str:
    field = RunConfig.model_fields[key]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    parts = [field.description or "", str(extra["more"])]
    if (flag := flags_of(key)[0]) != f"--{key.replace('_', '-')}":
        parts.append(f"The flag is {flag}.")
    if extra["env"]:
        parts.append(f"Also from the environment, as {extra['env']}.")
    text = textwrap.fill(
        " ".join(filter(None, parts)), _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    value = yaml.safe_dump(_EXAMPLES.get(key, field.default), default_flow_style=True).partition("\n")[0]
    return f"{text}\n{key}: {value}\n"
