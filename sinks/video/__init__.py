"""Results as video: MP4 files, recordings in segments, and what live viewers are sent."""
