"""The Moondream architecture: vision encoder, text decoder and region heads. config.json sets all sizes."""
