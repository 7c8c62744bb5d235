"""Receives the second, higher-resolution stream of a camera for recordings and clips. The stream is never decoded."""

from __future__ import annotations

import logging
import threading

from saccade.sources import LiveSource, SourceError

log = logging.getLogger(__name__)

_END_S = 5.0


class RecordSource:
    """Receives packets of a live source in a separate thread, for recordings and clips.

    Detection uses another source, so that an error of this source does not stop detection.

    Args:
        source: the source, with the packet callbacks already set (`source.taps`). `close` also closes the source.
    """

    def __init__(self, source: LiveSource) -> None:
        self.source = source
        self._thread = threading.Thread(target=self._receive, name="saccade record source", daemon=True)

    def start(self) -> None:
        """Start the thread that receives packets from the source."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that receives packets, and close the source."""
        self.source.close()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _receive(self) -> None:
        try:
            self.source.receive()
        except SourceError as error:
            log.warning("stream %s: record_source failed: %s", self.source.name, error)
        except Exception:  # a bug must not end the process silently
            log.exception("stream %s: record_source failed", self.source.name)
