"""Triton kernels of a prefill, whose rows are many: attention of images and prompts, and rows in FP8."""
