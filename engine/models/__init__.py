"""Model architectures that the engine can run, one folder each."""
