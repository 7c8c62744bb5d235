"""Triton kernels for a mixture of experts: the router, and the experts' GEMMs for few and for many rows."""
