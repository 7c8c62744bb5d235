"""The runtime: runs streams on one engine, each stream from its source to its outputs, with counters."""
