"""The benchmarks of `saccade bench`, one module each, and the code that they share."""
