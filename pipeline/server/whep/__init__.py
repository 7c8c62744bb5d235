"""WHEP: the video of streams to browsers and players, as an endpoint and as a sink."""
