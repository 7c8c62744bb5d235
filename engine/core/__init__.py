"""Scheduling of requests and allocation of device resources. The modules use neither PyTorch nor threads."""
