"""The command `saccade configs`: lists and prints the example configurations that the package contains."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from saccade.engine.models.model_files import read_names
from saccade.engine.tasks.task import Vocabulary
from saccade.lookups import run
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.cli.manual import manual
from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import ConfigError
from saccade.sources import SourceError, check_source, redact

_CLIP_IN_CHECKOUT = "pipeline/assets/demo.mp4"


def list_configs() -> dict[str, str]:
    """Return the first sentence of each example configuration, by name in alphabetical order."""
    return {name: text.partition("\n")[0].lstrip("# ").rstrip(":") for name, text in sorted(_texts().items())}


def read_config(name: str) -> str:
    """Return the text of an example configuration. The path of the demo clip is replaced by its path on this machine.

    Raises:
        ConfigError: if no example configuration has this name.
    """
    texts = _texts()
    wanted = name.removesuffix(".yaml")
    if wanted not in texts:
        raise ConfigError(f"unknown configuration '{name}'; available: {', '.join(sorted(texts))}")
    return texts[wanted].replace(_CLIP_IN_CHECKOUT, str(DEMO_CLIP))


def describe(config: RunConfig) -> str:
    """Describe a configuration: one line per stream, and one line about the model.

    Raises:
        EngineError: if the model does not know a label.
        ConfigError: if a URL is invalid, or an input file does not exist.
    """
    check_labels(config)
    _check_files(config)
    lines = []
    for number, stream in enumerate(config.each()):
        for key, source in (("source", stream.source), ("record_source", stream.record_source)):
            try:
                if source is not None:
                    check_source(source)
            except SourceError as error:
                raise ConfigError(f"{f'streams[{number}].' if config.streams else ''}{key}: {error}") from None
        named = f"{stream.name}: " if stream.name else ""
        asked = ", ".join(f"{skill} {text}" for skill, text in stream.asked)
        lines.append(f"{named}{redact(stream.source)}  {asked}")
    where = f", HTTP at {config.http}" if config.http else ""
    return "\n".join([*lines, f"ok: {len(lines)} stream{'s' * (len(lines) != 1)} on {config.model}{where}"])


def _check_files(config: RunConfig) -> None:
    """Check that the input files of a configuration exist, such as tokens and models. Sources are not checked."""
    named = {key: getattr(config, key) for key in ("http_token_file", "http_access", "http_cert", "http_key")}
    for key, model in (("model", config.model), ("ask", config.ask.model if config.ask else "")):
        if model.startswith(("/", "./", "../")):  # otherwise it may be a hub id
            named[key] = model
    for key, path in named.items():
        if path and not Path(path).exists():
            raise ConfigError(f"{key}: no such file: {path}")


def check_labels(config: RunConfig) -> None:
    """Check that the model knows the labels of prompts and rules.

    Nothing is checked if the model has an open vocabulary or is not installed.

    Raises:
        EngineError: if the model does not know a label.
    """
    names = read_names(config.model)
    if names is not None:
        vocabulary = Vocabulary(config.model, *names)
        for stream in config.each():
            vocabulary.resolve(text for skill, text in stream.asked if skill in ("detect", "point"))


def changes_of(path: Path, url: str, token: str | None) -> list[str]:
    """Return the changes that a configuration file would cause in a running Saccade, one line per change.

    Args:
        path: path of a valid configuration file.
        url: URL of the HTTP API.
        token: bearer token, or None.

    Raises:
        ConfigError: if the server does not respond or rejects the request.
    """
    from saccade.pipeline.cli.api_client import ApiClient, ApiError

    async def ask() -> list[str]:
        async with ApiClient(url, token) as client:
            return await client.config_changes(path.read_text(encoding="utf-8"))

    try:
        return run(ask())
    except (ApiError, ValueError) as error:
        raise ConfigError(f"--diff: {error}") from None


def _texts() -> dict[str, str]:
    folder = files("saccade").joinpath("configs")
    shipped = {
        path.name.removesuffix(".yaml"): path.read_text(encoding="utf-8")
        for path in folder.iterdir()
        if path.name.endswith(".yaml")  # the folder also contains a folder for monitoring
    }
    return {**shipped, "manual": manual()}
