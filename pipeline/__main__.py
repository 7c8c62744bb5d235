"""Lets `python -m pipeline` be `saccade`."""

from pipeline.cli import main

main()
