"""The benchmarks of `saccade bench`, one module each, and their shared code."""
