"""The implementations of larger commands, one module for each command."""
