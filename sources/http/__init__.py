"""HTTP servers: TLS, bearer tokens, origins of pages, bounded bodies and connections.

Imports nothing else of sources.
"""

from saccade.sources.http.app_server import AppServer
from saccade.sources.http.auth import HttpAuth, read_text, refusal
from saccade.sources.http.tls import optional_context, self_signed, server_context
from saccade.sources.http.tokens import find_token, is_loopback, read_token

__all__ = [
    "AppServer",
    "HttpAuth",
    "find_token",
    "is_loopback",
    "optional_context",
    "read_text",
    "read_token",
    "refusal",
    "self_signed",
    "server_context",
]
