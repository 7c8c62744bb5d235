"""Controllers for tests: over streams of a fixture, and with streams whose source is open already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.source_policy import SourcePolicy
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.streams import Streams
from saccade.sources import Source


def controller_of(
    streams: Streams, allow_sources: Sequence[str] = (), *, open_by_default: bool = True, base: RunConfig | None = None
) -> Controller:
    """What changes those streams, with a policy about what clients may open."""
    return Controller(Local(streams, policy=SourcePolicy(allow_sources, open_by_default=open_by_default)), base)


def attach(controller: Controller, name: str, source: Source, outputs: Sequence[Output] = (), **settings: Any) -> Run:
    """Run a stream of an open source; it finds persons if nothing else is said."""
    config = ListedStream.model_validate({"detect": "person", **settings, "name": name, "source": str(source.info.url)})
    stream = controller.local.open(config, source=source)
    stream.outputs.extend(outputs)
    return controller.attach(stream)
