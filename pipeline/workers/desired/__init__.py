"""What is to run, and where that is kept, so that it outlives whatever runs it."""
