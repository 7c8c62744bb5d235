"""The implementations of the larger commands, one module for each command."""
