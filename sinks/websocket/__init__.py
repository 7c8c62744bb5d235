"""The WebSocket feed: its server, its clients, their authentication and their subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.sinks.websocket.server import WebSocketSink

__all__ = ["WebSocketSink"]


def __getattr__(name: str) -> Any:
    """Import the server on demand: it brings websockets, which no other sink needs."""
    if name == "WebSocketSink":
        from saccade.sinks.websocket.server import WebSocketSink

        return WebSocketSink
    raise AttributeError(name)
