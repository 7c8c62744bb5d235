"""`python -m benchmarks soak`: measures how the memory of a Saccade process grows during a long run."""
