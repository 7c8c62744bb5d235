"""Network connections with checked addresses and the certificates that the user accepts."""
