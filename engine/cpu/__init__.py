"""CPU backend: fused operations, weights packed once, and thread counts."""
