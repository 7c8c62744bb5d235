"""WebRTC sources: browsers and encoders publish video to Saccade over WHIP."""

from saccade.sources.webrtc.data_channel import Messages
from saccade.sources.webrtc.listener import WebRtcListener
from saccade.sources.webrtc.source import WebRtcConnection, WebRtcSource
from saccade.sources.webrtc.whip_server import WebRtcServer

__all__ = ["Messages", "WebRtcConnection", "WebRtcListener", "WebRtcServer", "WebRtcSource"]
