"""A camera's own packets, written as they come, and read again: nothing is decoded or coded."""

from saccade.sinks.recording.archive import Archive, ArchiveError, Span
from saccade.sinks.recording.place import RecordingPlace
from saccade.sinks.recording.recorder import PacketRecorder

__all__ = ["Archive", "ArchiveError", "PacketRecorder", "RecordingPlace", "Span"]
