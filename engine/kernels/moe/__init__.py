"""Triton kernels of a mixture of experts: its router, and products of few rows and of many."""
