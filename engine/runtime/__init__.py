"""What runs steps on a device: the step loop, executors for CPU and CUDA, streams, samplers, counters and traces."""
