"""Scheduling and resources: pure bookkeeping without torch and threads."""
