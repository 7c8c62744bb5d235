"""Authentication of HTTP requests by bearer token and page origin, and limits on the size of a body.

Every HTTP server of the project uses these rules. A token is never logged. Knows no frames, results or WebRTC.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from aiohttp import web

_BODY_S = 5.0  # seconds within which a client must send its body


class HttpAuth:
    """Authorizes requests, or raises the HTTP response that refuses them, with the reason in one line of text.

    Args:
        token: what `Authorization: Bearer`, `X-Moondream-Auth` or `?token=` must carry; None accepts every request.
        origins: pages that may connect, as `https://example.org`, besides those of this server itself; "*" is any.
    """

    def __init__(self, token: str | None = None, origins: Sequence[str] = ()) -> None:
        self._token = token
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    def authorize(self, request: web.Request) -> dict[str, str]:
        """Check origin and token; return the CORS headers for the response.

        Raises:
            HTTPForbidden: if the request comes from a page of another origin.
            HTTPUnauthorized: if the token is missing or wrong.
        """
        cors = self.check_origin(request)
        if self._token is not None and not self._has_token(request, self._token):
            challenge = {**cors, "WWW-Authenticate": "Bearer"}
            raise refusal(web.HTTPUnauthorized, "a bearer token is needed, and this is not it", challenge)
        return cors

    def check_origin(self, request: web.Request) -> dict[str, str]:
        """Check the origin alone; return the CORS headers for the response.

        Raises:
            HTTPForbidden: if the request comes from a page of another origin.
        """
        origin = request.headers.get("Origin")
        if origin is None:
            return {}  # not from a page in a browser
        if not ({origin, "*"} & self._origins or self._is_own_page(origin, request.host)):
            raise refusal(web.HTTPForbidden, "pages of this origin may not connect; list it in `origins`")
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Location, Link",
            "Vary": "Origin",
        }

    async def preflight(self, request: web.Request, methods: str, accepted: str) -> web.Response:
        """Answer OPTIONS: `methods` as in `POST, DELETE`, and the content type that POST takes.

        Raises:
            HTTPForbidden: if the request comes from a page of another origin.
        """
        allowed = {
            "Access-Control-Allow-Methods": f"{methods}, OPTIONS",
            "Access-Control-Allow-Headers": "Authorization, Content-Type",
            "Access-Control-Max-Age": "600",
            "Accept-Post": accepted,
        }
        return web.Response(status=204, headers={**self.check_origin(request), **allowed})

    def _has_token(self, request: web.Request, token: str) -> bool:
        return hmac.compare_digest(self.token_in(request).encode(errors="surrogateescape"), token.encode())

    @staticmethod
    def token_in(request: web.Request) -> str:
        """The token that a request carries; "" without one."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = request.headers.get("X-Moondream-Auth") or request.query.get("token", "")
        return given.strip()

    def _is_own_page(self, origin: str, host: str) -> bool:
        """Whether a page comes from this very server.

        A host name is no proof: any page can have its own name resolve to this machine (DNS rebinding) and then has the
        same origin. Addresses and `localhost` cannot be spoofed that way, and a client with the token needs no proof.
        """
        if origin.partition("://")[2].lower() != host.lower():
            return False
        with suppress(ValueError):
            name = urlsplit(origin).hostname or ""
            return self._token is not None or name == "localhost" or _is_address(name)
        return False


async def read_text(request: web.Request, limit: int, what: str, headers: dict[str, str] | None = None) -> str:
    """The body of a request, as text.

    Args:
        request: its body must not have been read yet.
        limit: maximum size in bytes.
        what: what the body is, such as "an offer", for the error text.
        headers: of the error response.

    Raises:
        HTTPRequestEntityTooLarge, HTTPRequestTimeout, HTTPBadRequest: too long, incomplete after 5 s, not UTF-8.
    """
    too_much = web.HTTPRequestEntityTooLarge(limit, limit, text=f"{what} has at most {limit} bytes\n", headers=headers)
    if (request.content_length or 0) > limit:
        raise too_much
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            while part := await request.content.readany():
                body += part
                if len(body) > limit:
                    raise too_much
        return body.decode()
    except TimeoutError:
        raise refusal(web.HTTPRequestTimeout, f"{what} did not come within {_BODY_S:g} s", headers) from None
    except UnicodeDecodeError:
        raise refusal(web.HTTPBadRequest, f"{what} is not text in UTF-8", headers) from None
    except ConnectionError:  # nobody reads this, but it is no error of the server
        raise refusal(web.HTTPBadRequest, f"{what} did not come whole", headers) from None
    except web.RequestPayloadError:
        raise refusal(web.HTTPBadRequest, f"{what} is not encoded as its headers declare", headers) from None


def refusal(kind: type[web.HTTPException], reason: str, headers: dict[str, str] | None = None) -> web.HTTPException:
    """An HTTP error response of this type, with the reason as one line of text.

    What the client sent may be repeated in it, and is not always valid Unicode: a lone surrogate becomes an escape.
    """
    return kind(text=f"{reason.encode(errors='backslashreplace').decode()}\n", headers=headers)


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
