"""Controls a run: stores which streams are desired, and starts, changes and stops streams to match."""
