"""What single commands do, where it is more than a call: one module for each."""
