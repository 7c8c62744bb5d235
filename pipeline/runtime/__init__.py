"""Runs streams on one engine. Each stream passes frames from its source through the engine to its outputs."""
