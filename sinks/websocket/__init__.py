"""WebSocket sink: a server that sends results to programs and web pages, with authentication and subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.sinks.websocket.server import WebSocketSink

__all__ = ["WebSocketSink"]


def __getattr__(name: str) -> Any:
    """Import the server at the first use of its name, because it needs the package websockets."""
    if name == "WebSocketSink":
        from saccade.sinks.websocket.server import WebSocketSink

        return WebSocketSink
    raise AttributeError(name)
