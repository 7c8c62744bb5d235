"""What `saccade bench` measures: one module for each bench, and what they share."""
