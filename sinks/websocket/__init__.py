"""The WebSocket feed: its server, its clients, who is let in and what they subscribe to."""
