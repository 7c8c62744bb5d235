"""nano: a small Moondream model with an object detector as vision encoder.

This folder contains the model files and the PyTorch modules.
"""
