"""What the tests of the engine share: material (models, images, packs, graphs), and a stand-in for its device."""

from tests.support.engine.material import (
    GOLDEN,
    GOLDEN_3,
    NANO,
    SCREEN,
    TINY,
    TINY_3,
    Held,
    label,
    noise,
    one_thread,
    random_model,
    same,
    square,
    write_golden_case,
    write_model,
    write_pack,
)

__all__ = [
    "GOLDEN",
    "GOLDEN_3",
    "NANO",
    "SCREEN",
    "TINY",
    "TINY_3",
    "Held",
    "label",
    "noise",
    "one_thread",
    "random_model",
    "same",
    "square",
    "write_golden_case",
    "write_model",
    "write_pack",
]
