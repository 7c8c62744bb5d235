"""RTSP cameras: the client protocol, authentication, session descriptions, and the connection that yields frames."""

from saccade.sources.network.tls import TlsPolicy
from saccade.sources.rtsp.connection import Loss, RtspConnection
from saccade.sources.rtsp.session import UnhandledCodecError
from saccade.sources.rtsp.transport import Transport, TransportChoice

__all__ = ["Loss", "RtspConnection", "TlsPolicy", "Transport", "TransportChoice", "UnhandledCodecError"]
