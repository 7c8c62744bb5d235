"""`saccade configs`: the ready-made configurations that ship inside the package, listed and printed."""

from __future__ import annotations

from importlib.resources import files

from saccade.pipeline.core.assets import DEMO_CLIP
from saccade.pipeline.core.errors import ConfigError

_CLIP_IN_CHECKOUT = "pipeline/assets/demo.mp4"


def list_configs() -> dict[str, str]:
    """Name of each configuration → its first line, without the comment sign, in alphabetical order."""
    texts = {
        path.name.removesuffix(".yaml"): path.read_text(encoding="utf-8")
        for path in files("saccade").joinpath("configs").iterdir()
    }
    return {name: text.partition("\n")[0].lstrip("# ").rstrip(":") for name, text in sorted(texts.items())}


def read_config(name: str) -> str:
    """The text of a configuration, with the demo clip's path as it is on this machine.

    Raises:
        ConfigError: if none of that name ships.
    """
    known = list_configs()
    wanted = name.removesuffix(".yaml")
    if wanted not in known:
        raise ConfigError(f"no configuration is called '{name}'; there are {', '.join(known)}")
    text = files("saccade").joinpath("configs", f"{wanted}.yaml").read_text(encoding="utf-8")
    return text.replace(_CLIP_IN_CHECKOUT, str(DEMO_CLIP))
