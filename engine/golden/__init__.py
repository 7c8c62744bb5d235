"""Correctness checks of models and devices: stored reference results, a reference generation loop, and comparisons."""
