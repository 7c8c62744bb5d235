"""Benchmarks for developers: `python -m benchmarks --help`. They are not part of the wheel."""
