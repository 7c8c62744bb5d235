"""Execution of batch steps on a device: the step loop, executors for CPU and CUDA, streams, counters and traces."""
