"""HTTP servers: bearer tokens, origins of pages, bounded bodies and connections. Imports nothing else of sources."""

from saccade.sources.http.app_server import AppServer
from saccade.sources.http.auth import HttpAuth, read_text, refusal

__all__ = ["AppServer", "HttpAuth", "read_text", "refusal"]
