"""How the process with the HTTP face is recognised by its workers, and for which client it asks.

It has authenticated the client; a worker believes nobody else. Knows nothing of what is asked for.
"""

from __future__ import annotations

import json

from aiohttp import web
from pydantic import ValidationError
from saccade.pipeline.server.access import CLIENT, Client, client_of
from saccade.sources.http.auth import HttpAuth, refusal

_HEADER = "X-Saccade-Client"


class FrontAuth(HttpAuth):
    """Authorizes requests that carry the secret, as those of the client that they name.

    Args:
        secret: known to the front and this worker.
    """

    def __init__(self, secret: str) -> None:
        super().__init__(secret)

    def authorize(self, request: web.Request) -> dict[str, str]:
        """As `HttpAuth.authorize`; afterwards `client_of(request)` is the one that the front asks for."""
        cors = super().authorize(request)
        try:
            request[CLIENT] = Client.model_validate_json(request.headers.get(_HEADER, ""))
        except ValidationError:
            raise refusal(web.HTTPBadRequest, f"{_HEADER} is missing, or not a client") from None
        return cors


def front_headers(secret: str, request: web.Request) -> dict[str, str]:
    """The headers with which the front asks a worker on behalf of the client of `request`."""
    client = client_of(request)
    named = json.dumps({"name": client.name, "role": client.role, "streams": client.streams})
    return {"Authorization": f"Bearer {secret}", _HEADER: named}


def secret_headers(secret: str) -> dict[str, str]:
    """The headers with which the front asks a worker for itself."""
    return {"Authorization": f"Bearer {secret}", _HEADER: json.dumps({"name": "front", "role": "admin"})}
