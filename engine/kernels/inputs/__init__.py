"""Kernels that take images and inputs of steps from the host, and make crops of them."""
