"""nano: a small Moondream model with an object detector as vision encoder.

This folder contains its weights and classes.
"""
