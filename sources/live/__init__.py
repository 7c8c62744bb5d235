"""Live streams: connecting, decoding, reconnecting, and what FFmpeg opens."""
