"""A worker as a process of this machine: both ends of it, and how its results come out."""
