"""One stream and many: from configuration to source, queue, engine and sinks, and the counters of all of it."""
