"""Network connections of sources: checks IP addresses and applies the user's certificate policy."""
