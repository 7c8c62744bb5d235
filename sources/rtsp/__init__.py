"""The RTSP client: requests, authentication, session descriptions, its connection."""
