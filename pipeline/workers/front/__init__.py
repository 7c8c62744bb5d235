"""The process in front of the workers: what there is once a machine, and one HTTP face for all streams."""
