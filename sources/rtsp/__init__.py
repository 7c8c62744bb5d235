"""RTSP cameras: the client protocol, authentication, session descriptions, and the connection that yields frames."""

from saccade.sources.rtsp.client import RtspClient, Transport
from saccade.sources.rtsp.connection import RtspConnection, UnhandledCodecError

__all__ = ["RtspClient", "RtspConnection", "Transport", "UnhandledCodecError"]
