"""Benchmarks for developers: `python -m benchmarks --help`. The Python wheel does not contain them."""
