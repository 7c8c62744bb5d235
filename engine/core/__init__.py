"""Scheduling of requests and allocation of resources. The modules use neither torch nor threads."""
