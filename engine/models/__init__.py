"""Model families the engine can run. One folder a family."""
