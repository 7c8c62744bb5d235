"""Execution of steps on a device: step loop, executors for CPU and CUDA, streams, counters and traces."""
