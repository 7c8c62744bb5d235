"""The Moondream architecture. A config file sets all sizes."""
