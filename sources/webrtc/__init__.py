"""WebRTC in: the WHIP server, its peers, and the source that gives their frames."""
