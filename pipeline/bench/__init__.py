"""The benchmarks of the command `saccade bench`: one module per benchmark, and shared code."""
