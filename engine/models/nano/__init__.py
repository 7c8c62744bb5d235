"""nano: a detector as the vision tower of a small Moondream. Its weights and names lie beside this code."""
