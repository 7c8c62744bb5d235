"""Access control of the WebSocket server: reads the access options in its URL, and accepts or rejects clients."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from saccade.addresses import with_plain_zone
from saccade.sinks.base import SinkError
from saccade.sinks.urls import Options, redact_target
from saccade.sinks.websocket.subscription import Subscription
from saccade.web.tls import server_context
from saccade.web.tokens import find_token, is_loopback

DEFAULT_PORT = 8765
MAX_CLIENTS = 32


class RefusedError(Exception):
    """Raised if a WebSocket client is rejected. The message is one line for the client.

    Attributes:
        status: HTTP status of the response.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True, frozen=True)
class FeedTarget:
    """Address and access rules of the WebSocket server.

    Attributes:
        host, port: address to listen on; port 0 selects any free port.
        path: path that clients must request.
        token: token that clients must send; None for no authentication.
        origins: other origins whose web pages may connect; "*" allows all. Pages of this machine are always allowed.
        max_clients: maximum number of connected clients.
        tls: TLS context with the server's certificate; None for no encryption.
    """

    host: str
    port: int
    path: str
    token: str | None = field(repr=False)
    origins: frozenset[str]
    max_clients: int
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, text: str) -> FeedTarget:
        """Parse a listening address such as `ws://HOST:PORT/PATH?token=…` or `wss://HOST:PORT?cert=FILE&key=FILE`.

        Raises:
            SinkError: if the address is invalid, or other machines can reach it and it has no token.
        """
        shown = redact_target(text)
        try:
            parts = urlsplit(with_plain_zone(text))
            port = DEFAULT_PORT if parts.port is None else parts.port
        except ValueError:
            raise SinkError(f"{shown} is not an address to listen on; use ws://HOST:PORT/PATH?token=…") from None
        if parts.username is not None:
            raise SinkError(f"{shown}: write the token as ?token=…; a token before @ is not supported")
        options = Options(parts.query, shown)
        given, token_file = options.text("token") or None, options.text("token_file") or None
        origins = frozenset(origin.rstrip("/") for origin in options.texts("origin"))
        max_clients = options.count("max_clients", MAX_CLIENTS, 10_000)
        tls = _certificate(options, shown) if parts.scheme == "wss" else None
        options.reject_unknown()
        host = parts.hostname or "127.0.0.1"
        try:
            token = find_token(given, token_file, host)
        except ValueError as error:
            raise SinkError(f"{shown}: {error}") from None
        if token is None and not is_loopback(host):
            raise SinkError(f"{shown} is reachable from the network: add a token with the option token")
        if token is not None and any(character.isspace() for character in token):
            raise SinkError(f"{shown}: a token must not contain spaces; write + as %2B")
        return cls(host, port, parts.path or "/", token, origins, max_clients, tls)

    def admit(self, request: str, origins: Sequence[str], authorizations: Sequence[str]) -> Subscription:
        """Check the request of a WebSocket client. Return the subscription from the query of its URL.

        Args:
            request: path and query of the request.
            origins: values of the request's `Origin` headers.
            authorizations: values of the request's `Authorization` headers.

        Raises:
            RefusedError: if the client is rejected.
        """
        path, _, query = request.partition("?")
        if path != self.path:
            raise RefusedError(HTTPStatus.NOT_FOUND, "the WebSocket server has no feed at this path")
        if not all({origin, "*"} & self.origins or _is_local_page(origin) for origin in origins):
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                "web pages of this origin are not allowed to connect; add the option origin=… to the sink",
            )
        if self.token is not None and not any(
            hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode())
            for given in _tokens(query, authorizations)
        ):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "a valid token is required")
        try:
            return Subscription.from_query(query)
        except ValueError as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None


def _tokens(query: str, authorizations: Sequence[str]) -> list[str]:
    """Return all access tokens in a request: in the query, and in `Authorization` headers."""
    pairs = [line.partition(" ") for line in authorizations]
    bearer = [given.strip() for kind, _, given in pairs if kind.lower() == "bearer"]
    return bearer + parse_qs(query).get("token", [])


def _certificate(options: Options, shown: str) -> ssl.SSLContext:
    certificate, key = options.text("cert"), options.text("key")
    if not certificate:
        raise SinkError(f"{shown}: wss needs a certificate; set the options cert and key")
    try:
        return server_context(certificate, key)
    except ValueError as error:
        raise SinkError(f"{shown}: {error}") from None


def _is_local_page(origin: str) -> bool:
    """Return whether the host of a web page is `localhost` or a loopback IP address. Such a page is trusted."""
    with suppress(ValueError):
        parts = urlsplit(origin)
        # No other names, because any name can resolve to a loopback address (DNS rebinding).
        return parts.scheme in ("http", "https") and is_loopback(parts.hostname or "")
    return False
