"""Triton kernels for steps of a few rows, where the time is that of reading weights and cache once.

Each has a plain counterpart in `engine.models` that it must agree with. Importing a module of this package needs
Triton; nothing outside `engine.packed` and `engine.crops` does.
"""
