"""Defines the routes of the HTTP API. Each route declares the role that a client needs.

    routes = Routes("streams")

    @routes.get("/streams/{name}", role="viewer")
    async def show(name: str, controller: Wanted) -> Stream: ...

The default role is admin. Request bodies have size limits. Every response is ASCII JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, SkipValidation, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from saccade.pipeline.api.access import Client, Role, client_of
from saccade.pipeline.config.file import NOT_UNICODE, explain, first_mistake
from saccade.pipeline.control.controller import Controller
from saccade.web.body import parse_json, read_bytes, require_type
from saccade.web.errors import HttpError
from saccade.web.guard import HELD_SLASH

MAX_BODY_BYTES = 64 * 1024
YAML = "application/yaml"

AnyText = SkipValidation[str]
"""A string in a response. A file name can contain bytes that are not UTF-8, represented as lone surrogates."""

Limited = Literal["never", "asked", "always"]
"""Whether a client with access to only some streams can call a route without a stream in its path. `asked` allows
requests with `?stream=` and the name of an allowed stream. `always` is for routes that reveal no other streams."""

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Any]])


class Json(JSONResponse):
    """A response with ASCII JSON. Non-ASCII characters, and bytes of file names that are not UTF-8, are escaped."""

    def render(self, content: Any) -> bytes:
        """Return the response body, encoded as ASCII JSON."""
        return json.dumps(content).encode()


def the(kind: type[T], absent: str | None = None) -> Any:
    """Return a FastAPI dependency that provides the application's object of class `kind`.

    If the application has no such object, the request fails with status 404 and the error message in `absent`.
    """

    async def find(request: Request) -> T:
        part: T | None = request.app.state.parts.get(kind)
        if part is None:
            raise HttpError(404, absent)
        return part

    return Depends(find)


Wanted = Annotated[Controller, the(Controller)]
Who = Annotated[Client, Depends(client_of)]


class Error(BaseModel):
    """The response to a request that failed: an error message of one line."""

    error: str


class ApiRoute(APIRoute):
    """A route of the HTTP API.

    Attributes:
        role: lowest role that can call the route.
        limited: access of clients that are limited to some streams: "always", "never", or "asked" (only with the query
            parameter `stream`).
        most: maximum size of the request body, in bytes.
        mistake: HTTP status if the request body does not match its schema.
        surrogates: whether strings in the body can contain lone surrogates (bytes of file names that are not UTF-8).
    """

    role: Role = "admin"
    limited: Limited = "never"
    most = MAX_BODY_BYTES
    mistake = 422
    surrogates = True

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the path of a request to this route. `%2F` in a path parameter is decoded to a slash."""
        match, child = super().matches(scope)
        if match is not Match.NONE:
            given = child["path_params"].items()
            child["path_params"] = {key: value.replace(HELD_SLASH, "/") for key, value in given}
        return match, child

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a request handler that limits the size of the request body.

        If the body is invalid, the response is an error message of one line.
        """
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            try:
                return await handle(_BoundedRequest(request, self))
            except RequestValidationError as error:
                raise HttpError(self.mistake, self._explained(error)) from None
            except UnicodeEncodeError:  # raised by pydantic for a validator's message
                raise HttpError(self.mistake, NOT_UNICODE) from None

        return bounded

    def _explained(self, error: RequestValidationError) -> str:
        known: Any = next((field.field_info.annotation for field in self.dependant.body_params), BaseModel)
        mistakes: Any = error  # like an error of pydantic, except for the changes below
        first: Any = dict(first_mistake(mistakes))
        first["loc"] = first["loc"][1:]  # after "body"
        if first["type"] == "model_attributes_type":
            first["type"] = "model_type"
        return explain(first, known)


class _BoundedRequest(Request):
    def __init__(self, request: Request, route: ApiRoute) -> None:
        super().__init__(request.scope, request.receive)
        self._route = route

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            require_type(self, "application/json", "the body")
            # Not empty, because FastAPI treats an empty body as missing.
            self._body = await read_bytes(self, self._route.most, "a body") or b" "
        return self._body

    async def json(self) -> Any:
        parse = json.loads if self._route.surrogates else parse_json
        try:
            text = (await self.body()).decode()
            return await asyncio.to_thread(parse, text) if len(text) > MAX_BODY_BYTES else parse(text)
        except UnicodeDecodeError:
            raise HttpError(400, "the body is not UTF-8 text") from None
        except (ValueError, RecursionError):
            raise HttpError(400, "the body is not JSON") from None


@contextmanager
def bad_values(status: int, about: str = "") -> Iterator[None]:
    """Convert a ValueError in the `with` block to an HttpError.

    Args:
        status: HTTP status of the error.
        about: start of the error message.
    """
    try:
        yield
    except ValueError as error:
        raise HttpError(status, f"{about}{error}") from None


class _Verb(Protocol):
    """The type of the decorators `get`, `post`, `put`, `patch` and `delete`, which register a route."""

    def __call__(self, path: str, *, role: Role = "admin", **how: Any) -> Callable[[Handler], Handler]: ...


class Routes:
    """A group of routes, such as all routes for streams.

    Attributes:
        all: all routes of the group.

    Args:
        tag: name of the group in the OpenAPI schema.
        kind: class of the route objects.
    """

    def __init__(self, tag: str, kind: type[ApiRoute] = ApiRoute) -> None:
        self.all: list[ApiRoute] = []
        self._tag = tag
        self._kind = kind
        self.get: _Verb = partial(self.add, "GET")
        self.post: _Verb = partial(self.add, "POST")
        self.put: _Verb = partial(self.add, "PUT")
        self.patch: _Verb = partial(self.add, "PATCH")
        self.delete: _Verb = partial(self.add, "DELETE")

    def add(
        self, method: str, path: str, *, role: Role = "admin", limited: Limited = "never", **options: Any
    ) -> Callable[[Handler], Handler]:
        """Return a decorator that adds a route with the decorated function as its handler.

        Args:
            method: HTTP method. A GET route also accepts HEAD.
            path: path in FastAPI's format.
            role: lowest role that can call the route.
            limited: access of clients that are limited to some streams, see `ApiRoute`.
            options: other arguments of `fastapi.routing.APIRoute`.
        """

        def decorate(handler: Handler) -> Handler:
            responses = {"default": {"model": Error, "description": "The error"}} | options.pop("responses", {})
            options.setdefault("response_class", Json)
            options["openapi_extra"] = {"x-role": role} | options.pop("openapi_extra", {})
            options["operation_id"] = f"{self._tag}_{handler.__name__.removeprefix('_')}"
            route = self._kind(path, handler, methods=[method], responses=responses, tags=[self._tag], **options)
            route.role, route.limited = role, limited
            self.all.append(route)
            return handler

        return decorate


SDP_BODY = {"requestBody": {"required": True, "content": {"application/sdp": {"schema": {"type": "string"}}}}}
"""The OpenAPI description of a request body that is an SDP offer."""


async def read_model(request: Request, kind: type[Model]) -> Model:
    """Parse the JSON body of a request as a pydantic model.

    Raises:
        HttpError: with status 422 if the body does not match the model.
    """
    values = await request.json()
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise HttpError(422, explain(first_mistake(error), kind)) from None
