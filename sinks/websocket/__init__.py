"""WebSocket sink: a server that sends results to programs and web pages, with authentication and subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.sinks.websocket.server import WebSocketSink

__all__ = ["WebSocketSink"]


def __getattr__(name: str) -> Any:
    """Import `WebSocketSink` at its first use, because it needs the optional package websockets."""
    if name == "WebSocketSink":
        from saccade.sinks.websocket.server import WebSocketSink

        return WebSocketSink
    raise AttributeError(name)
