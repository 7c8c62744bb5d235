"""CUDA backend: packed weights and Triton kernels. Importing its modules needs Triton."""
