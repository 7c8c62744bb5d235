"""The WebSocket feed: server, clients, authentication and subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.sinks.websocket.server import WebSocketSink

__all__ = ["WebSocketSink"]


def __getattr__(name: str) -> Any:
    """Import the server on demand, because only it needs the package websockets."""
    if name == "WebSocketSink":
        from saccade.sinks.websocket.server import WebSocketSink

        return WebSocketSink
    raise AttributeError(name)
