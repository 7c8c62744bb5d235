"""The control layer: the desired state of a run, and the streams that follow it."""
