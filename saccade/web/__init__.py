"""HTTP servers: who may come in, TLS, bounded bodies and connections. Imports nothing else of the project."""
