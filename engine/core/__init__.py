"""Scheduling of requests and allocation of device resources. The modules import no PyTorch and start no threads."""
