"""Files that a stream has left when its last worker let go of it: kept, where the next one would replace them."""

from __future__ import annotations

from saccade.pipeline.config import ListedStream
from saccade.pipeline.runtime.targets import Target


def keep_outputs(name: str, config: ListedStream, each: list[Target]) -> None:
    """Move the files of a stream aside that its outputs would replace, since its last worker has left them so."""
    targets = [target.of(name) for target in (*each, *map(Target, config.sinks))]
    for target in targets:
        path = target.path
        if path is None or not target.replaces or not path.is_file() or not path.stat().st_size:
            continue
        number = 1
        while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
