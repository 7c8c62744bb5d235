"""Video sinks: MP4 files, segmented recordings, and live video for browsers."""

from saccade.sinks.video.broadcast import BroadcastSink, NoSuchStreamError, View, Viewer, ViewerFrame
from saccade.sinks.video.encoder import Codec, EncodedImage, LiveEncoder
from saccade.sinks.video.live_audio import LiveAudio
from saccade.sinks.video.mp4 import Mp4Sink
from saccade.sinks.video.segmented_mp4 import RecordingSink

__all__ = [
    "BroadcastSink",
    "Codec",
    "EncodedImage",
    "LiveAudio",
    "LiveEncoder",
    "Mp4Sink",
    "NoSuchStreamError",
    "RecordingSink",
    "View",
    "Viewer",
    "ViewerFrame",
]
