"""The second stream of a camera, with larger images: it is received for recordings and clips, and never decoded."""

from __future__ import annotations

import logging
import threading

from saccade.sources import LiveSource, SourceError

log = logging.getLogger(__name__)

_END_S = 5.0


class RecordSource:
    """Receives a live source in a thread of its own, for its taps. Detection does not depend on it.

    Args:
        source: the source; its taps are complete. It is closed with this object.
    """

    def __init__(self, source: LiveSource) -> None:
        self.source = source
        self._thread = threading.Thread(target=self._receive, name="saccade record source", daemon=True)

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    def close(self) -> None:
        """Stop receiving."""
        self.source.close()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _receive(self) -> None:
        try:
            self.source.receive()
        except SourceError as error:
            log.warning("%s: the record source has failed: %s", self.source.name, error)
        except Exception:  # a bug must not end the process silently
            log.exception("%s: the record source has failed", self.source.name)
