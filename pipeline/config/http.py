"""The settings of the HTTP server of `saccade run`: address and access control."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from pydantic import field_validator

from saccade.addresses import with_plain_zone
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.settings import FileText, NullIsUnset, Text, setting
from saccade.web.tls import optional_context
from saccade.web.tokens import is_loopback, read_token


class HttpSettings(NullIsUnset):
    """The settings of the HTTP server: address, TLS and access control."""

    http: Text | None = setting(
        None,
        "Address of the HTTP server: API, console, /healthz and /metrics.",
        more="/streams lists, adds, removes and changes streams. /metrics is for Prometheus. Any address "
        "except 127.0.0.1 needs a token.",
        metavar="HOST:PORT",
    )
    http_token: Text | None = setting(
        None,
        "Token that HTTP clients send as `Authorization: Bearer …`; the environment variable is safer.",
        metavar="TOKEN",
        env="SACCADE_TOKEN",
        repr=False,
    )
    http_token_file: FileText | None = setting(None, "File with the token, instead of http_token.", metavar="FILE")
    http_access: FileText | None = setting(
        None,
        "File with the clients of the HTTP server: viewers, operators and admins, each with a token.",
        more="The file can also limit clients to streams, trust the headers of an authenticating proxy, and "
        "write an audit log. docs/guides/http.md shows an example. A client with http_token is then an "
        "admin.",
        metavar="FILE",
    )
    allow_sources: list[FileText] = setting(
        [],
        "Sources that clients can open (POST /streams): globs of paths and addresses, networks such as 192.168.7.0/24.",
        more="By default, everything is allowed if http is on 127.0.0.1, otherwise nothing. Symbolic links of a"
        " path are "
        "resolved first. The list also applies to every redirect, playlist, segment and key. A private "
        "host needs an entry for its network or for the host itself. Sources that listen on the network "
        "always need an entry.",
        metavar="ENTRY",
        flags=("--allow-source",),
    )
    http_cert: FileText | None = setting(
        None, "TLS certificate (PEM) of the HTTP server, to serve https.", metavar="FILE"
    )
    http_key: FileText | None = setting(
        None, "Private key of the certificate in PEM format, if the key is in another file.", metavar="FILE"
    )

    ice_servers: list[Text] = setting(
        [],
        "STUN or TURN server for video in browsers on other networks: stun:HOST:PORT or turn:USER:PASSWORD@HOST:PORT.",
        more="There is no default server, because a public server would learn who connects. Viewers receive the"
        " addresses and passwords.",
        metavar="SERVER",
        flags=("--ice-server",),
        repr=False,
    )

    @field_validator("ice_servers")
    @classmethod
    def _ice_servers(cls, value: list[str]) -> list[str]:
        if value:
            from saccade.sources.webrtc.signaling import ice_server  # imports aiortc

            for text in value:
                ice_server(text)
        return value

    @field_validator("http")
    @classmethod
    def _place(cls, value: str | None) -> str | None:
        if value is not None:
            parse_place(value)
        return value


def parse_place(text: str) -> tuple[str, int]:
    """Parse a server address: `HOST:PORT`, `:PORT`, `PORT` or `HOST`.

    The default host is 127.0.0.1. The default port is 8080.

    Raises:
        ValueError: if the text has none of these forms.
    """
    try:
        parts = urlsplit(f"//:{text}" if text.isdecimal() else with_plain_zone(f"//{text}"))
        port = 8080 if parts.port is None else parts.port
    except ValueError:
        parts, port = urlsplit(""), -1
    if port < 0 or parts.username is not None or parts.path or parts.query:
        raise ValueError("expected an address HOST:PORT, such as 127.0.0.1:8080")
    return parts.hostname or "127.0.0.1", port


def check_open(host: str, token: str | None) -> None:
    """Check that a server has a token if other machines can connect to it.

    Raises:
        ConfigError: if other machines can connect to `host`, and no token is set.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{host} is reachable from the network and requires a token: use --http-token-file or set SACCADE_TOKEN"
        )


def tls_of(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Load a TLS certificate and its key. Return the TLS context, or None if no certificate is configured.

    Raises:
        ConfigError: if the certificate or key cannot be used.
    """
    try:
        return optional_context(cert, key)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def token_of(token: str | None, token_file: str | None) -> str | None:
    """Return the configured token, or the content of the token file. Return None if neither is configured.

    Raises:
        ConfigError: if the token file is empty.
    """
    try:
        return token or (read_token(token_file) if token_file else None)
    except ValueError as error:
        raise ConfigError(str(error)) from None
