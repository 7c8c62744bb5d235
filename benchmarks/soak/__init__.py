"""`python -m benchmarks soak`: whether a process that runs for a long time grows."""
