"""Common parts of the HTTP servers: authentication, TLS, and limits of bodies and connections."""
