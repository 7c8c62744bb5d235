"""Triton kernels for a mixture of experts: the router, and GEMMs of the experts for one, few and many rows."""
