"""Authentication of HTTP requests by bearer token and by the origin of the web page. A token is never logged."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.requests import Request

from saccade.web.errors import HttpError


class HttpAuth:
    """Authenticates HTTP requests by token and by the origin of the web page.

    Args:
        token: token that each request must contain: as `Authorization: Bearer`, `X-Moondream-Auth` or `?token=`. None
            disables the check.
        origins: other origins whose web pages may send requests, such as `https://example.org`; "*" allows all. Pages
            of this server are always allowed.
    """

    def __init__(self, token: str | None = None, origins: Sequence[str] = ()) -> None:
        self._token = token
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    def authorize(self, request: Request) -> None:
        """Check the token of a request. Raises HttpError 401 if it is missing or wrong."""
        if self._token is not None and not self.has_token(request, self._token):
            raise unauthorized()

    def check_origin(self, request: Request) -> dict[str, str]:
        """Reject requests from web pages of other origins, unless they are allowed. Return the CORS response headers.

        Raises:
            HttpError: 403 if the origin is not allowed.
        """
        origin = request.headers.get("Origin")
        if origin is None:
            return {}  # not from a page in a browser
        if not ({origin, "*"} & self._origins or self._is_own_page(origin, request.headers.get("Host", ""))):
            raise HttpError(403, "web pages of this origin are not allowed to connect; add the origin to `origins`")
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Location, Link",
            "Vary": "Origin",
        }

    def has_token(self, request: Request, token: str) -> bool:
        """Return whether the access token in a request equals `token`. Compares in constant time."""
        return hmac.compare_digest(self.token_in(request).encode(errors="surrogateescape"), token.encode())

    @staticmethod
    def token_in(request: Request) -> str:
        """Return the token in a request's headers or query; "" if it has none."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = request.headers.get("X-Moondream-Auth") or request.query_params.get("token", "")
        return given.strip()

    def _is_own_page(self, origin: str, host: str) -> bool:
        """Return whether a web page comes from this server.

        Without a token, the page's host must also be an IP address or `localhost`, to prevent DNS rebinding.
        """
        if origin.partition("://")[2].lower() != host.lower():
            return False
        with suppress(ValueError):
            return self._token is not None or is_address_or_localhost(urlsplit(origin).hostname or "")
        return False


def unauthorized() -> HttpError:
    """Return the HTTP error 401 for a request without a valid token."""
    return HttpError(401, "a valid bearer token is required", {"WWW-Authenticate": "Bearer"})


def is_address_or_localhost(host: str) -> bool:
    """Return whether a host is an IP address or `localhost`."""
    with suppress(ValueError):
        return host == "localhost" or bool(ipaddress.ip_address(host))
    return False
