"""Lets `python -m saccade` be the command `saccade`."""

from saccade.pipeline.cli.main import main

main()
