"""What one step samples for a sequence. Shared by scheduling, which plans it, and by kernels, which branch on it."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What one step samples from the hidden state it ends with."""

    X_OR_EOS = 0  # one more object or stop, and its x
    Y = 1
    SIZE = 2
    TOKEN = 3
