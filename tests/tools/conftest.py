"""A server of `sok serve` within the process of the tests: what is in a process of its own takes seconds to start."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web

from sok.tools.serving.access import Access, Files
from sok.tools.serving.app import App
from sok.tools.serving.gate import Limits
from sok.tools.serving.metrics import Metrics
from sok.tools.serving.models import Models

LIMITS = Limits(request_bytes=100_000, seconds=60.0, requests=64, threads=4)


@contextlib.contextmanager
def running(
    models: Models, metrics: Metrics, limits: Limits, with_control: bool = True, access: Access | None = None
) -> Iterator[int]:
    """The port at which an App answers."""
    access = access or Access(Files(), with_control)
    app = App(models, limits, metrics, access)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app.application(), access_log=None, shutdown_timeout=5)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=access.tls).start()
        return runner.addresses[0][1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
        assert app.close(30)


@pytest.fixture(scope="module")
def serve() -> Callable[..., contextlib.AbstractContextManager[int]]:
    return running
