"""Correctness checks of models and devices: golden data, a reference generation loop, and comparisons."""
