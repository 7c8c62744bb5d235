"""CUDA backend: packed weights and Triton kernels. Its modules can be imported only with Triton."""
