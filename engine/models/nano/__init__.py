"""nano: a small Moondream whose vision encoder is a detector. Its weights and classes are in this folder."""
