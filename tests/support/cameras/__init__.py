"""Cameras for the tests: real RTSP servers as processes, and one in Python that follows a script."""

from tests.support.cameras.rtsp import (
    GREY,
    LONG_S,
    Camera,
    Watcher,
    burnt_in_age_ms,
    free_port,
    need_servers,
    wait_for,
)

__all__ = ["GREY", "LONG_S", "Camera", "Watcher", "burnt_in_age_ms", "free_port", "need_servers", "wait_for"]
