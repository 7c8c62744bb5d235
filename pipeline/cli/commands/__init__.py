"""The commands that are more than one call, one module each."""
