"""Comparisons with other software: `python -m benchmarks against …`, one module each."""
