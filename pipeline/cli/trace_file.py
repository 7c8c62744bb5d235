"""`saccade run --trace`: what the engine did and when, as a file for https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from saccade.engine import Engine


def check_file(path: Path | None) -> None:
    """Refuse, before anything has been opened, what can hold no trace.

    Raises:
        ConfigError: if it is no .json file in a folder that exists.
    """
    if path is not None and path.suffix != ".json":
        raise ConfigError(f"--trace: should be a .json file, got {str(path)!r}")
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--trace: no file can be written at {str(path)!r}: there is no such folder")


@contextmanager
def traced(engine: Engine, path: Path) -> Iterator[None]:
    """Trace the engine in the block; what was traced is kept also when the block fails.

    Raises:
        ConfigError: if the file cannot be written.
    """
    with engine.tracing() as trace:
        try:
            yield
        finally:
            try:
                trace.save(path)
            except OSError as error:
                raise ConfigError(f"--trace: {path}: {error.strerror or error}") from error
