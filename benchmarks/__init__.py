"""Benchmarks for developers: `python -m benchmarks --help`; not part of the wheel."""
