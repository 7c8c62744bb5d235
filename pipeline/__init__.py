"""Joins sources, engine and sinks: configuration, the run loop and the command line."""
