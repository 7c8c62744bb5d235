"""What runs slower than it could on this machine, and why: one log line each, and `ModelInfo.fallbacks`."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Fallbacks(list[str]):
    """An engine's fallbacks, each a line for people."""

    def note(self, what: str) -> None:
        """Add one, and log it, unless it is there already."""
        if what not in self:
            self.append(what)
            log.warning("%s", what)


def reason_of(error: BaseException) -> str:
    """The first line of an error's message: what torch and drivers put behind it is advice."""
    return (str(error).strip().splitlines() or [""])[0]
