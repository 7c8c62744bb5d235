"""What is to run, and how it comes to run: the desired state, and the streams of this process that follow it."""
