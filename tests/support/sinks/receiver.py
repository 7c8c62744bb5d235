"""A web server that keeps what is posted to it, and misbehaves on request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Receiver:
    """A web server in a thread that keeps what is posted; `answers` are given first, then 200; on one port for ever."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, str], Any]] = []
        self.answers: list[Answer | int] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.on()

    def on(self) -> None:
        asyncio.run_coroutine_threadsafe(self._on(), self._loop).result(10)

    def off(self) -> None:
        asyncio.run_coroutine_threadsafe(self._off(), self._loop).result(10)

    def close(self) -> None:
        self.off()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url(self, rest: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{rest}"

    @property
    def bodies(self) -> list[Any]:
        return [body for _, _, body in list(self.posts)]

    async def _on(self) -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/{tail:.*}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _off(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            rest = asyncio.all_tasks() - {asyncio.current_task()}  # handlers that are still asleep
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        answer = self.answers.pop(0) if self.answers else 200
        if not isinstance(answer, int):
            return await answer(request)
        if answer == 200:
            self.posts.append((str(request.rel_url), dict(request.headers), await request.json()))
        return web.Response(status=answer, text="x" * 1000)


async def busy(request: web.Request) -> web.StreamResponse:
    return web.Response(status=429, headers={"Retry-After": "1"})


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(1)
    return web.Response()


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()
