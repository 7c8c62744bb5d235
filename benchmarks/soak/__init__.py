"""`python -m benchmarks soak`: measures how the memory of a long-running process grows."""
