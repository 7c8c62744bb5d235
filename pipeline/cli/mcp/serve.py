"""Serves the MCP tools over standard input and output, or over HTTP."""

from __future__ import annotations

import hmac
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from saccade.distribution import VERSION, install_command
from saccade.lookups import run as run_loop
from saccade.pipeline.config import parse_place
from saccade.pipeline.errors import ConfigError
from saccade.web.tokens import is_loopback, read_token

Message = MutableMapping[str, Any]
Asgi = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


def serve(url: str, token: str | None, token_file: str | None, http: str | None) -> None:
    """Run the MCP server until the client disconnects. Over HTTP, run until a signal stops the server.

    Args:
        url: address of the HTTP API of a running Saccade.
        token: bearer token of the API. HTTP clients of this server must also send this token.
        token_file: path of a file that contains the token.
        http: address to listen on, HOST:PORT; None for standard input and output.

    Raises:
        ConfigError: if an address cannot be used, or the package mcp is not installed.
    """
    try:
        from saccade.pipeline.cli.api_client import ApiClient
        from saccade.pipeline.cli.mcp.tools import make_server
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        raise ConfigError(f"this command needs the package mcp: {install_command('mcp')}") from None
    try:
        token = token or (read_token(token_file) if token_file else None)
        api = ApiClient(url, token)
        place = parse_place(http) if http else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if place and token is None and not is_loopback(place[0]):
        raise ConfigError(
            f"the address {place[0]} is reachable from the network and requires a token: set SACCADE_TOKEN"
        )

    async def run() -> None:
        async with api:
            server = make_server(api, VERSION)
            if place:
                await _serve_http(server, place, token)
            else:
                await server.run_stdio_async()

    run_loop(run())


async def _serve_http(server: Any, place: tuple[str, int], token: str | None) -> None:
    import uvicorn

    host, port = place
    application = server.streamable_http_app(host=host)
    guarded = application if token is None else with_token(application, token)
    config = uvicorn.Config(guarded, host=host, port=port, log_level="warning", access_log=False, lifespan="on")
    print(f"saccade: MCP at http://{host}:{port}/mcp  (Ctrl-C stops it)", file=sys.stderr, flush=True)
    await uvicorn.Server(config).serve()


def with_token(application: Asgi, token: str) -> Asgi:
    """Wrap an ASGI application so that it rejects every request without the token (`Authorization: Bearer`)."""
    wanted = f"Bearer {token}".encode()

    async def guard(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] != "http" or hmac.compare_digest(given, wanted):
            await application(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "a valid bearer token is required"}'})

    return guard
