"""RTSP client for cameras: protocol, authentication, session descriptions (SDP) and frames."""

from saccade.sources.network.tls import TlsPolicy
from saccade.sources.rtsp.connection import Loss, RtspConnection
from saccade.sources.rtsp.session import UnhandledCodecError
from saccade.sources.rtsp.transport import Transport, TransportChoice

__all__ = ["Loss", "RtspConnection", "TlsPolicy", "Transport", "TransportChoice", "UnhandledCodecError"]
