"""CPU backend: fused operations, weights that are packed once, and control of the number of threads."""
