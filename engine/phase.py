"""What one step samples for a sequence. Shared by scheduling, which plans it, and by kernels, which branch on it."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What one step samples from the hidden state it ends with."""

    X_OR_EOS = 0  # one more object or stop, and its x
    Y = 1
    SIZE = 2
    TOKEN = 3  # of text, any that a grammar allows
    LATER_TOKEN = 4  # of free text after its first: ids that the model suppresses there are never sampled
    REASONING = 5  # a word, or a coordinate where the coordinate token is sampled; a `TokenRule` says more


TEXT_PHASES = frozenset({Phase.TOKEN, Phase.LATER_TOKEN, Phase.REASONING})
