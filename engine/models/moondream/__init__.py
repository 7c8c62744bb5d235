"""Moondream's architecture at any size, driven by its config file."""
