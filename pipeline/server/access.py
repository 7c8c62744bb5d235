"""Who may do what over HTTP: clients with roles, tokens and streams of their own, from a file; and an audit of changes.

    clients:
      - {name: anna, role: operator, token: …, streams: [yard]}    # or token_file; without streams, all
    proxy:                                    # a reverse proxy that authenticates people itself
      addresses: [127.0.0.1]                  # requests of others carry no such headers that count
      user: X-Forwarded-User
      role: X-Forwarded-Groups                # the strongest of the roles that its values stand for
      roles: {admins: admin, guards: viewer}
    audit: audit.jsonl                        # a line for each change: when, who, what, and how it was answered

A viewer looks, an operator also changes what is found, zones and rules, and asks the model; an admin also adds and ends
streams, and reads and writes the configuration.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import secrets
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from saccade.pipeline.config.file import explain, first_mistake
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.settings import FileText, Names, Text
from saccade.sources.http.auth import HttpAuth, refusal
from saccade.sources.http.tokens import read_token

log = logging.getLogger(__name__)

Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
_READING = ("GET", "HEAD", "OPTIONS")
_STREAM, _EVENT = "/streams/{name}", "/events/{id}"
_ROUTES: dict[Role, dict[str, tuple[str, ...]]] = {
    "operator": {
        "GET": ("/events/search",),  # it is read, but has a model asked
        "PATCH": (_STREAM,),
        "PUT": (f"{_STREAM}/zones", f"{_STREAM}/rules"),
        "POST": (
            *(f"{_STREAM}/restart", f"{_STREAM}/rules/check", "/whip", "/v1/chat/completions"),
            *("/v1/detect", "/v1/point", "/v1/segment", "/v1/query", "/v1/caption"),
        ),
        "DELETE": (f"{_STREAM}/zones", f"{_STREAM}/rules", _EVENT, "/whip/{session}"),
    },
    "viewer": {
        "GET": (
            *("/healthz", "/metrics", "/workers", "/config", "/model", "/names", "/v1/models"),
            *(
                "/streams",
                _STREAM,
                f"{_STREAM}/zones",
                f"{_STREAM}/counts",
                f"{_STREAM}/rules",
                f"{_STREAM}/rules/state",
            ),
            *(f"{_STREAM}/rules/state", f"{_STREAM}/history", f"{_STREAM}/frame.jpg", f"{_STREAM}/heatmap.png"),
            *("/events", "/events/rules", _EVENT, f"{_EVENT}/{{file}}"),
        ),
        "POST": ("/whep/{stream}",),
        "DELETE": ("/whep/{stream}/{session}",),
    },
}
"""The routes that a role may call, besides those of weaker ones. A route that is not here needs an admin."""
_OF_ALL = ("/metrics", "/healthz", "/events", "/config", "/workers")  # which tell of every stream
_OF_ASKED = ("/events", "/events/search", "/events/rules")  # of these, with `?stream=NAME` of that one alone


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError("should be an address or a network, such as 10.0.0.0/8") from None
    return text


class Client(BaseModel):
    """Who makes a request.

    Attributes:
        name: for the audit.
        role: what it may do.
        token, token_file: what it sends, or the file that holds it.
        streams: the only ones that it may know of; all if empty.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field(description="for the audit")
    role: Role = Field(description="viewer, operator or admin")
    token: Text | None = Field(default=None, repr=False)
    token_file: FileText | None = None
    streams: Names = []

    def may(self, role: Role) -> bool:
        """Whether its role is that, or a stronger one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def sees(self, stream: str) -> bool:
        """Whether it may know of a stream."""
        return not self.streams or stream in self.streams


CLIENT = web.RequestKey("client", Client)


class _Proxy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    addresses: list[Annotated[str, AfterValidator(_network)]] = Field(min_length=1)
    user: Text = Field(description="the header with the name of a person")
    role: Text | None = None
    roles: dict[Text, Role] = {}
    default: Role | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    clients: list[Client] = Field([], max_length=1000)
    proxy: _Proxy | None = None
    audit: FileText | None = None


class Access(HttpAuth):
    """Authorizes each request for what it asks; its `Client` is then `client_of(request)`.

    Args:
        path: of the file.
        token: of one more client, an admin.

    Raises:
        ConfigError: if the file cannot be read, or holds a mistake.
    """

    def __init__(self, path: Path, token: str | None = None) -> None:
        super().__init__(token or secrets.token_urlsafe(16))  # one that nobody has
        settings = _read(path)
        self._clients = {_token_of(path, client): client for client in settings.clients}
        if len(self._clients) < len(settings.clients):
            raise ConfigError(f"{path}: two clients have the same token")
        if token is not None:
            self._clients[token] = Client(name="http_token", role="admin")
        self._proxy = settings.proxy
        self._audit = Path(settings.audit) if settings.audit else None
        self._lock = threading.Lock()

    def authorize(self, request: web.Request) -> dict[str, str]:
        """As `HttpAuth.authorize`; raises HTTPForbidden where the client's role or streams do not allow it."""
        cors = self.check_origin(request)
        client = self._client_of(request)
        if client is None:
            challenge = {**cors, "WWW-Authenticate": "Bearer"}
            raise refusal(web.HTTPUnauthorized, "a bearer token is needed, and this is not it", challenge)
        request[CLIENT] = client
        role = required_role(request.method, request.rel_url.raw_path)
        if not client.may(role):
            raise refusal(web.HTTPForbidden, f"this needs the role {role}, and {client.name} is {client.role}", cors)
        names = [request.match_info[key] for key in ("name", "stream") if key in request.match_info]
        asked = request.query.getall("stream", [])
        hidden = [name for name in (*names, *asked) if not client.sees(name)]
        of_one = names or (asked and request.path in _OF_ASKED)
        if hidden or (client.streams and not of_one and _tells_of_all(request)):
            raise refusal(web.HTTPForbidden, f"{client.name} may see {', '.join(client.streams)} only", cors)
        return cors

    def note(self, request: web.Request, status: int) -> None:
        """Write the audit line of a request that was answered, if it was one that changes something. May block."""
        client: Client | None = request.get(CLIENT)
        if client is None or request.method in _READING or request.path.startswith(("/whep", "/v1/")):
            return
        if request.path.endswith("/rules/check"):  # which changes nothing, and comes with every key that is pressed
            return
        resource = request.match_info.route.resource  # and not the path, which may hold the secret of a session
        what = resource.canonical if resource else "?"
        for key in ("name", "id", "rest"):
            what = what.replace(f"{{{key}}}", request.match_info.get(key, ""))
        line = {
            "at": round(time.time(), 3),
            "client": client.name,
            "role": client.role,
            "change": f"{request.method} {what}",
            "status": status,
            "from": request.remote,
        }
        log.info("%s (%s) %s: %s", client.name, client.role, line["change"], status)
        if self._audit is not None:
            with self._lock, self._audit.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _client_of(self, request: web.Request) -> Client | None:
        given = self.token_in(request)
        found = None
        for token, client in self._clients.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
                found = client
        return found or self._behind_proxy(request)

    def _behind_proxy(self, request: web.Request) -> Client | None:
        """The person that a trusted proxy says it has authenticated."""
        proxy, name = self._proxy, ""
        if proxy is None or not _is_among(request.remote, proxy.addresses):
            return None
        name = request.headers.get(proxy.user, "").strip()[:200]
        values = re.split(r"[,;\s]+", request.headers.get(proxy.role, "")) if proxy.role else []
        roles = [proxy.roles[value] for value in values if value in proxy.roles]
        role = max(roles, key=ROLES.index, default=proxy.default)
        return Client(name=name, role=role) if name and role and name.isprintable() else None


def client_of(request: web.Request) -> Client:
    """Who makes a request; an admin where there are no roles."""
    client: Client | None = request.get(CLIENT)
    return client or Client(name="anyone", role="admin")


def required_role(method: str, path: str) -> Role:
    """The least role for a request: the one that its route is listed for, else admin."""
    for role, routes in _ROUTES.items():  # the operator's first: /events/search is no event
        if any(_pattern(route).fullmatch(path) for route in routes.get("GET" if method == "HEAD" else method, ())):
            return role
    return "admin"


@cache
def _pattern(route: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(route)))


def _tells_of_all(request: web.Request) -> bool:
    """Whether a request that names no stream would tell of those that its client may not see, or change them."""
    path = request.path
    return path.startswith(_OF_ALL) or (request.method not in _READING and not path.startswith(("/v1/", "/whip")))


def _is_among(address: str | None, networks: list[str]) -> bool:
    with suppress(ValueError):
        one = ipaddress.ip_address((address or "").partition("%")[0])
        return any(one in ipaddress.ip_network(network, strict=False) for network in networks)
    return False


def _token_of(path: Path, client: Client) -> str:
    if bool(client.token) == bool(client.token_file):
        raise ConfigError(f"{path}: client {client.name} needs a token or a token_file, one of both")
    try:
        return client.token or read_token(client.token_file or "")
    except ValueError as error:
        raise ConfigError(f"{path}: client {client.name}: {error}") from None


def _read(path: Path) -> _File:
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _File.model_validate({} if values is None else values)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: broken YAML: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        first = first_mistake(error)
        shown = {**first, "input": None} if "token" in map(str, first["loc"]) else first  # which may be a secret
        raise ConfigError(f"{path}: {explain(shown, _File)}") from None
