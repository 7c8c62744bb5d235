"""nano: a small Moondream model whose vision encoder is an object detector. This folder has its weights and classes."""
