"""Access control of the HTTP API. An access file defines the role, token and streams of each client.

    clients:
      - {name: anna, role: operator, token: …, streams: [yard]}  # all streams if `streams` is missing
    proxy:                                # reverse proxy that authenticates users
      addresses: [127.0.0.1]              # the addresses of the proxy
      user: X-Forwarded-User              # header with the name of the user
      role: X-Forwarded-Groups            # header with the groups of the user
      roles: {admins: admin, guards: viewer}    # the role of each group
    audit: audit.jsonl                    # log of all changes, one JSON line per change

A viewer can read. An operator can also change prompts, zones and rules, and query the model. An admin can also add and
remove streams, and write the configuration.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from saccade.pipeline.config.file import explain, first_mistake, read_config_text
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.settings import FileText, Names, Text
from saccade.web.auth import HttpAuth, is_address_or_localhost, unauthorized
from saccade.web.errors import HttpError
from saccade.web.guard import Guard
from saccade.web.tokens import read_token

log = logging.getLogger(__name__)

ClientRole = Literal["viewer", "operator", "admin"]
Role = Literal["anyone"] | ClientRole
ROLES: tuple[Role, ...] = ("anyone", "viewer", "operator", "admin")
_READING = ("GET", "HEAD", "OPTIONS")
_CLIENT = "saccade.client"
CLIENT_HEADER = "X-Saccade-Client"


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError("expected an IP address or network, such as 10.0.0.0/8") from None
    return text


class Client(BaseModel):
    """An HTTP client with its name, role and permitted streams.

    Attributes:
        name: name of the client, for the audit log.
        role: viewer, operator or admin.
        token: token of the client, or None.
        token_file: path of a file that contains the token, or None.
        streams: names of the streams that the client can access; empty for all streams.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field(description="name of the client in the audit log")
    role: ClientRole = Field(description="viewer, operator or admin")
    token: Text | None = Field(default=None, repr=False)
    token_file: FileText | None = None
    streams: Names = []

    def may(self, role: Role) -> bool:
        """Return whether the client has the given role or a higher role."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def sees(self, stream: str) -> bool:
        """Return whether the client can access a stream."""
        return not self.streams or stream in self.streams


ANYONE = Client(name="anyone", role="admin")
"""The client of every request if there is no access file."""


class _Proxy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    addresses: list[Annotated[str, AfterValidator(_network)]] = Field(min_length=1)
    user: Text = Field(description="name of the HTTP header that contains the user's name")
    role: Text | None = None
    roles: dict[Text, ClientRole] = {}
    default: ClientRole | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    clients: list[Client] = Field([], max_length=1000)
    proxy: _Proxy | None = None
    audit: FileText | None = None


class Access(HttpAuth):
    """Access control with a single token. Clients with this token have the role admin."""

    @property
    def guarded(self) -> bool:
        """Whether requests need a token or other credentials."""
        return self._token is not None

    def identify(self, request: Request) -> Client | None:
        """Authenticate a request, and return its client. Return None if access is denied."""
        return ANYONE if self._token is None or self.has_token(request, self._token) else None

    def note(self, client: Client, change: str, status: int, origin: str | None) -> None:
        """Write a change, its HTTP status and the client's IP address to the audit log. This call can block."""


class RoleAccess(Access):
    """Access control with an access file, which defines clients and their roles.

    Args:
        path: path of the access file.
        token: token of an additional admin, or None.

    Raises:
        ConfigError: if the file cannot be read or is invalid.
    """

    def __init__(self, path: Path, token: str | None = None) -> None:
        super().__init__(token or secrets.token_urlsafe(16))  # an unknown token
        settings = _read(path)
        self._clients = {_token_of(path, client): client for client in settings.clients}
        if len(self._clients) < len(settings.clients):
            raise ConfigError(f"{path}: two clients have the same token; use a different token for each")
        if token is not None:
            self._clients[token] = Client(name="http_token", role="admin")
        self._proxy = settings.proxy
        self._audit = Path(settings.audit) if settings.audit else None
        self._lock = threading.Lock()

    def identify(self, request: Request) -> Client | None:
        """Authenticate a request, and return its client. Return None if access is denied."""
        found = None
        for token, client in self._clients.items():  # compares all tokens, so that the time reveals nothing
            if self.has_token(request, token):
                found = client
        return found or self._behind_proxy(request)

    def note(self, client: Client, change: str, status: int, origin: str | None) -> None:
        """Append a change, its HTTP status and the client's IP address to the audit log file. This call can block."""
        line = {
            "at": round(time.time(), 3),
            "client": client.name,
            "role": client.role,
            "change": change,
            "status": status,
            "from": origin,
        }
        log.info("%s (role %s) requested %s: HTTP status %s", client.name, client.role, change, status)
        if self._audit is not None:
            with self._lock, self._audit.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _behind_proxy(self, request: Request) -> Client | None:
        """Return the client that a trusted reverse proxy has authenticated. Return None if there is no such client."""
        proxy = self._proxy
        if proxy is None or not _is_among(address_of(request), proxy.addresses):
            return None
        name = request.headers.get(proxy.user, "").strip()[:200]
        values = re.split(r"[,;\s]+", request.headers.get(proxy.role, "")) if proxy.role else []
        roles = [proxy.roles[value] for value in values if value in proxy.roles]
        role = max(roles, key=ROLES.index, default=proxy.default)
        return Client(name=name, role=role) if name and role and name.isprintable() else None


class WorkerAccess(Access):
    """Access control of a worker process: only the controller process can send requests.

    A request header contains the name, role and streams of the client.

    Args:
        secret: secret that the controller and the worker share.
    """

    def identify(self, request: Request) -> Client | None:
        """Authenticate the controller. Return the client from the request header, or None if access is denied."""
        if super().identify(request) is None:
            return None
        try:
            return Client.model_validate_json(request.headers.get(CLIENT_HEADER, ""))
        except ValidationError:
            raise HttpError(400, f"{CLIENT_HEADER} is missing or invalid") from None


def client_of(request: Request) -> Client:
    """Return the client of an authenticated request."""
    client: Client = request.scope[_CLIENT]
    return client


def headers_for(client: Client) -> dict[str, str]:
    """Return the HTTP header that tells a worker the name, role and streams of a client."""
    return {CLIENT_HEADER: client.model_dump_json(include={"name", "role", "streams"})}


def address_of(request: Request) -> str | None:
    """Return the client's IP address. Return None if the address is unknown."""
    return request.client.host if request.client else None


class AccessGuard(Guard):
    """Authenticates and authorizes every HTTP request, and writes changes to the audit log.

    Args:
        routes: routes of the application.
        access: authenticates clients.
    """

    def __init__(self, routes: Sequence[BaseRoute], access: Access) -> None:
        super().__init__(routes, access)
        self._access = access

    def admit(self, request: Request, route: BaseRoute | None) -> None:
        """Check that the client has the required role and access to the stream.

        Raises:
            HttpError: with status 401 if the token is missing or invalid, or with status 403 if access is denied.
        """
        if not self._access.guarded and not _is_local_name(request.headers.get("Host", "")):
            # A web page can make its name resolve to this machine (DNS rebinding) and read without a token.
            raise HttpError(403, "without a token, use an IP address or localhost in the URL")
        role: Role = getattr(route, "role", "admin")
        if role == "anyone":
            return
        client = self._access.identify(request)
        if client is None:
            raise unauthorized()
        request.scope[_CLIENT] = client
        if not client.may(role):
            raise HttpError(403, f"this request needs the role {role}, but {client.name} has the role {client.role}")
        limited = getattr(route, "limited", "never")
        given = request.scope.get("path_params", {})
        names = [given[key] for key in ("name", "stream") if key in given]
        asked = request.query_params.getlist("stream")
        open_to_it = limited == "always" or names or (asked and limited == "asked")
        if client.streams and (not open_to_it or not all(map(client.sees, [*names, *asked]))):
            raise HttpError(403, f"{client.name} can only access {', '.join(client.streams)}")

    def error(self, request: Request, status: int, line: str, headers: Any) -> Response:
        """Return an error message as JSON. For a path under /v1, the JSON object has the format of OpenAI's API."""
        described: Any = line
        if request.scope["path"].startswith("/v1/"):
            kind = {401: "authentication_error", 403: "permission_error"}.get(status)
            kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
            described = {"message": line, "type": kind, "param": None, "code": None}
        return JSONResponse({"error": described}, status, headers)

    async def note(self, request: Request, route: BaseRoute | None, status: int) -> None:
        """Write a request to the audit log if it changes a setting, a stream or an event.

        Reads, WHEP sessions (viewers), model queries and rule checks are not logged.
        """
        client: Client | None = request.scope.get(_CLIENT)
        if client is None or request.method in _READING or _is_no_change(request.scope["path"]):
            return
        what = getattr(route, "path", "?")  # the pattern and not the path, which can contain a session's secret
        for key in ("name", "id"):
            what = what.replace(f"{{{key}}}", request.path_params.get(key, ""))
        change = f"{request.method} {what}"
        try:
            await asyncio.to_thread(self._access.note, client, change, status, address_of(request))
        except OSError as error:
            log.warning("cannot write the audit log: %s", error.strerror or error)


def _is_no_change(path: str) -> bool:
    return path.startswith(("/whep", "/v1/")) or path.endswith("/rules/check")


def _is_local_name(place: str) -> bool:
    with suppress(ValueError):
        return is_address_or_localhost(urlsplit(f"//{place}").hostname or "")
    return False


def _is_among(address: str | None, networks: list[str]) -> bool:
    with suppress(ValueError):
        one = ipaddress.ip_address((address or "").partition("%")[0])
        return any(one in ipaddress.ip_network(network, strict=False) for network in networks)
    return False


def _token_of(path: Path, client: Client) -> str:
    if bool(client.token) == bool(client.token_file):
        raise ConfigError(f"{path}: client {client.name} needs either token or token_file: set one of them")
    try:
        return client.token or read_token(client.token_file or "")
    except ValueError as error:
        raise ConfigError(f"{path}: client {client.name}: {error}") from None


def _read(path: Path) -> _File:
    try:
        values: Any = yaml.safe_load(read_config_text(path))
        return _File.model_validate({} if values is None else values)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        first = first_mistake(error)
        shown = {**first, "input": None} if "token" in map(str, first["loc"]) else first  # may be a secret
        raise ConfigError(f"{path}: {explain(shown, _File)}") from None
