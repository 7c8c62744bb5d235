"""The implementations of larger commands, one module each."""
