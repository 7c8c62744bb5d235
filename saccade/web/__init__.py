"""Shared parts of the HTTP servers: authentication, TLS, and limits for requests and connections."""
