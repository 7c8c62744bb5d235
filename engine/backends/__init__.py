"""How a model's layers are computed: plain, fused for a CPU, packed for CUDA; with caches, adapters, quantization."""
