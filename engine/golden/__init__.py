"""Correctness checks of models and devices: comparisons with stored results and with a reference decoder."""
