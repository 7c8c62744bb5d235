"""The runtime runs the streams on one engine: each stream from source to outputs, with its counters."""
