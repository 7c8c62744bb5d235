"""Comparisons of Saccade with other software, one module per comparison: `python -m benchmarks against …`."""
