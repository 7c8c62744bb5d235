"""What is measured of everything after the model: tracks, rules and events."""
