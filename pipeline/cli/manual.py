"""The manual of all settings.

The manual is a valid YAML configuration. It is generated from the declarations of the settings.

`saccade configs manual` prints the manual. configs/manual.yaml is a copy.
"""

from __future__ import annotations

import textwrap

import yaml

from saccade.pipeline.cli.sections import sections
from saccade.pipeline.config import RunConfig, flags_of

_WIDTH = 120
_HEADER = """\
# Every setting with its default, as a configuration that runs. `saccade configs manual` prints it.
#
#     saccade run --config configs/manual.yaml holiday.mp4 --detect dog --out dog.mp4
#
# Each key is also a flag of `saccade run`; a flag overrides the file. Paths are relative to the working directory.
# Missing keys have the value shown here. `source` is required, and at least one of detect, point and query.
"""
_EXAMPLES = {"source": "pipeline/assets/demo.mp4", "detect": ["person"]}


def manual() -> str:
    """Return the manual of all settings as YAML."""
    parts = [_HEADER]
    for heading, keys in sections().items():
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
