"""Recordings of a camera's encoded packets without transcoding: writing and reading."""

from saccade.sinks.recording.archive import Archive, ArchiveError, Span
from saccade.sinks.recording.place import RecordingPlace
from saccade.sinks.recording.recorder import PacketRecorder

__all__ = ["Archive", "ArchiveError", "PacketRecorder", "RecordingPlace", "Span"]
