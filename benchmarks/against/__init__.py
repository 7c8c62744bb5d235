"""Comparisons of Saccade with other software: `python -m benchmarks against …`, one module each."""
