"""Model architectures of the engine, one folder each, and the functions that find and load a model."""
