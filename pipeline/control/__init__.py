"""Starts, changes and stops the streams of a run."""
