"""Triton kernels of a prefill, whose rows are many: FP8 on both sides of products."""
