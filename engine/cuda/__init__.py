"""A model's layers on CUDA over packed weights and Triton kernels. Importing its modules needs Triton."""
