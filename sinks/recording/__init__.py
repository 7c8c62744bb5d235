"""Recordings of a camera's encoded packets: written without re-encoding, and read again."""

from saccade.sinks.recording.archive import Archive, ArchiveError, Span
from saccade.sinks.recording.place import RecordingPlace
from saccade.sinks.recording.recorder import PacketRecorder

__all__ = ["Archive", "ArchiveError", "PacketRecorder", "RecordingPlace", "Span"]
