"""The runtime: one stream's run from source to outputs, all streams on one engine, and their counters."""
