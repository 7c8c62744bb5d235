"""A model's layers on a CPU: few large operations, weights laid out once, threads set for it."""
