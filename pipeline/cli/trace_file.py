"""The option `saccade run --trace`: writes a timeline of the engine for the viewer https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from saccade.engine import Engine


def check_file(path: Path | None) -> None:
    """Check the path of the trace file.

    Raises:
        ConfigError: if the path is not a .json file in an existing folder.
    """
    if path is not None and path.suffix != ".json":
        raise ConfigError(f"--trace: should be a .json file, got {str(path)!r}")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--trace: the folder {str(path.parent)!r} does not exist")
    if path is not None and path.is_dir():
        raise ConfigError(f"--trace: {str(path)!r} is a folder; name a file")


@contextmanager
def traced(engine: Engine, path: Path) -> Iterator[None]:
    """Trace the engine during the `with` block, then write the trace file, even after an error in the block.

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
                raise ConfigError(f"--trace: cannot write {path}: {error.strerror or error}") from error
