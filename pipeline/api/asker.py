"""Runs the model for HTTP requests. The number of concurrent requests is limited to give priority to video streams."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from starlette.types import Receive, Scope, Send

from saccade.engine.core.admission import StreamSettings
from saccade.engine.errors import DeadlineError, EngineClosedError, EngineError
from saccade.engine.results import Result
from saccade.engine.tasks import Caption, Query, Segment
from saccade.engine.tasks.task import Task
from saccade.pipeline.api.forward import WorkerRoute
from saccade.pipeline.api.routes import bad_values, the
from saccade.sources.frame import RgbImage
from saccade.web.errors import HttpError

if TYPE_CHECKING:
    from saccade.engine import Engine
    from saccade.engine.results import TextStream

_STREAM = "requests over HTTP"  # name of the engine stream for requests
_WEIGHT = 0.25  # weight relative to a camera
_BODIES = 8  # bodies in memory at a time; each takes several times its size
TURN_S = 60.0  # longest wait of a request for its turn
ANSWER_S = 120.0  # time limit of the engine

T = TypeVar("T")


class Asker:
    """Sends requests of HTTP clients to an inference engine.

    Args:
        engine: the inference engine.
        at_once: maximum number of concurrent requests. By default, 1 on a CPU and 8 on a GPU.
    """

    def __init__(self, engine: Engine, at_once: int | None = None) -> None:
        self.engine = engine
        engine.configure_stream(_STREAM, StreamSettings(weight=_WEIGHT, newest=False))
        self._turns = asyncio.Semaphore(at_once or (1 if engine.model.device == "cpu" else 8))

    @property
    def model_name(self) -> str:
        """The name of the model. For a model that was loaded from a folder, the name of the folder."""
        name = self.engine.model.name
        return Path(name).name if os.path.isdir(name) else name

    async def decode(self, decode: Callable[[], T]) -> T:
        """Run `decode`, which decodes data of a client, in a thread.

        Raises:
            HttpError: with status 400 if `decode` raises ValueError.
        """
        with bad_values(400):
            return await asyncio.to_thread(decode)

    async def result(self, image: RgbImage | None, tasks: Sequence[Task]) -> Result:
        """Run tasks on an image, and return the engine's result.

        Raises:
            HttpError: if the engine fails or is overloaded.
        """
        try:
            async with _held(self._turns):
                future = await asyncio.to_thread(self.engine.submit, image, tasks, deadline_s=ANSWER_S, stream=_STREAM)
                return await asyncio.wrap_future(future)
        except (EngineError, ValueError) as error:
            raise as_http(error) from None

    async def pieces(
        self,
        image: RgbImage | None,
        task: Query | Caption | Segment,
        done: Callable[[Result], object] = lambda result: None,
    ) -> AsyncGenerator[str]:
        """Yield a generated text in pieces. Closing the generator cancels the request.

        Args:
            image: (height, width, 3) uint8 RGB image of the request; None for a question without an image.
            task: task that generates text.
            done: callback that receives the complete result.

        Raises:
            HttpError: if the engine fails or is overloaded.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | Exception | Result] = asyncio.Queue()

        def pump(stream: TextStream) -> None:
            end: Exception | Result
            try:
                for piece in stream:
                    loop.call_soon_threadsafe(queue.put_nowait, piece)
                end = stream.result
            except (Exception, CancelledError) as error:  # CancelledError if the generator is closed early
                end = error
            loop.call_soon_threadsafe(queue.put_nowait, end)

        async with _held(self._turns):
            try:
                stream = await asyncio.to_thread(self.engine.stream, image, task, deadline_s=ANSWER_S)
            except (EngineError, ValueError) as error:
                raise as_http(error) from None
            pumping = loop.run_in_executor(None, pump, stream)
            try:
                while isinstance(piece := await queue.get(), str):
                    yield piece
                if isinstance(piece, Exception):
                    raise as_http(piece) from None
                done(piece)
            finally:
                stream.close()
                await pumping


@asynccontextmanager
async def _held(places: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(TURN_S):
            await places.acquire()
    except TimeoutError:
        late = {"Retry-After": "5"}
        raise HttpError(503, "too many requests wait for the model; try again", late) from None
    try:
        yield
    finally:
        places.release()


def as_http(error: Exception) -> HttpError:
    """Convert an engine error to an HTTP error: status 503 for a timeout or a closed engine, otherwise 400."""
    return HttpError(503 if isinstance(error, DeadlineError | EngineClosedError) else 400, str(error))


class Bodies:
    """Limits the number of request bodies with images that are in memory concurrently."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_BODIES)

    def place(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits while too many request bodies with images are in memory.

        The request body of the caller is counted until the `with` block ends.

        Raises:
            HttpError: with status 503 after a wait of 60 s.
        """
        return _held(self._places)


@dataclass(slots=True, frozen=True)
class Askers:
    """The engines that serve HTTP requests.

    Attributes:
        finding: engine for object detection.
        talking: engine for text generation, which can be the same engine.
    """

    finding: Asker
    talking: Asker


class ModelRoute(WorkerRoute):
    """A route that accepts images in the request body.

    The number of request bodies in memory is limited. Above the limit, a request waits before its body is read.
    """

    most = 16 * 1024 * 1024
    mistake = 400
    surrogates = False

    async def handle_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request in this process. Wait first while too many request bodies are in memory."""
        bodies: Bodies = scope["app"].state.parts[Bodies]
        async with bodies.place():
            await super().handle_here(scope, receive, send)


Engines = Annotated[Askers, the(Askers)]
