"""Kernels over maps of features. Needs Triton."""
