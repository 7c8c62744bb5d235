"""`python -m benchmarks soak`: memory growth of a long-running process."""
