"""Requests passed on to a worker that ends in the middle of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from saccade.pipeline.api.access import CLIENT, Client
from saccade.pipeline.workers.front.forwarding import Forwarder

_HALF = bytes(1 << 20)


async def half_a_clip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_length = 2 * len(_HALF)
    await response.prepare(request)
    await response.write(_HALF)
    await asyncio.sleep(0.1)
    assert request.transport is not None
    request.transport.abort()
    return response


@web.middleware
async def as_admin(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    request[CLIENT] = Client(name="anna", role="admin")
    return await handler(request)


async def served(application: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def read(answer: aiohttp.ClientResponse, into: bytearray) -> None:
    async with asyncio.timeout(20):
        async for part in answer.content.iter_any():
            into += part


async def fetch_half() -> bytes:
    """What a client gets of the clip before the connection ends."""
    worker_application = web.Application()
    worker_application.router.add_get("/clip.mp4", half_a_clip)
    worker, worker_url = await served(worker_application)
    forwarder, got = Forwarder("sesame"), bytearray()

    async def forward(request: web.Request) -> web.StreamResponse:
        return await forwarder.forward(request, worker_url)

    front_application = web.Application(middlewares=[as_admin])
    front_application.on_startup.append(forwarder.start)
    front_application.on_cleanup.append(forwarder.close)
    front_application.router.add_get("/clip.mp4", forward)
    front, url = await served(front_application)
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/clip.mp4") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read(answer, got)
    finally:
        await front.cleanup()
        await worker.cleanup()
    return bytes(got)


def test_a_clip_whose_worker_ends_is_cut_off_and_no_more() -> None:
    assert asyncio.run(fetch_half()) == _HALF
