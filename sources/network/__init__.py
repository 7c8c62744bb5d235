"""Connections to servers: looked up once, checked, and with the certificates that the user accepts."""
