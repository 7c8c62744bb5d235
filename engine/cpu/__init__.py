"""CPU backend: fused operations, weights that are packed once, and control of thread counts."""
