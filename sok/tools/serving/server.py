"""A server from its start to its end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys

from aiohttp import web

from sok.tools.serving.access import Access, Files
from sok.tools.serving.app import App
from sok.tools.serving.gate import Limits
from sok.tools.serving.metrics import Metrics
from sok.tools.serving.models import Models

logger = logging.getLogger("sok.serve")
# How long connections and threads may take to end after the last answer, before the process ends without them.
PATIENCE = 2.0


def serve(paths: dict[str, str], options: argparse.Namespace) -> int:
    """Loads the models at `paths`, listens, and returns 0 after SIGTERM or SIGINT, when running requests have ended.

    Raises:
        Refused, ValueError: a model, a certificate or a token cannot be loaded.
        OSError: the address cannot be listened at.
    """
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logger.setLevel(logging.INFO)
    names = ("tls_cert", "tls_key", "tls_client_ca", "token_file", "control_token_file")
    files = Files(*(getattr(options, name) for name in names))
    access = Access(files, options.control)
    with _bound(options.host, options.port) as listening:  # first: a port that is taken need not wait for a model
        if access.tls is None and (files.tokens or files.control_tokens) and not _is_of_this_machine(listening):
            logger.warning("tokens travel as they are, where everybody between can read them. --tls-cert encrypts.")
        return _serve(paths, options, listening, access)


def _is_of_this_machine(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def _serve(paths: dict[str, str], options: argparse.Namespace, listening: socket.socket, access: Access) -> int:
    # Half a million objects of TensorFlow's, which no collection need look at again: one follows each swap.
    gc.collect()
    gc.freeze()
    metrics = Metrics()
    models = Models(options.versions, options.poll_seconds, metrics)
    for name, path in paths.items():
        models.add(name, path)
    threads = options.threads or max(4, len(os.sched_getaffinity(0)))
    limits = Limits(options.max_request_bytes, options.timeout_seconds, options.max_requests, threads)
    app = App(models, limits, metrics, access)
    asyncio.run(_listen(app, models, listening, access, options))
    closed = [models.close(PATIENCE), app.close(PATIENCE)]
    if not all(closed):
        # A model that is being loaded, or answers nobody any more: TensorFlow cannot be stopped, and must not be
        # torn down under it.
        logger.warning("ended while TensorFlow was still at work")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """A socket with its address, which does not listen yet."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror}. --host and --port say where.") from None
    return bound


async def _refreshed(access: Access, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        access.refresh()


async def _listen(
    app: App, models: Models, listening: socket.socket, access: Access, options: argparse.Namespace
) -> None:
    seconds = options.timeout_seconds
    # aiohttp waits as long for a connection that came in the last moment, whose request it does not read any more.
    runner = web.AppRunner(app.application(), access_log=None, shutdown_timeout=PATIENCE)
    await runner.setup()
    site = web.SockSite(runner, listening, ssl_context=access.tls)
    refreshing = asyncio.create_task(_refreshed(access, options.poll_seconds))
    try:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await site.start()
        host, port = listening.getsockname()[:2]
        told = ", ".join(f"{model.name} (version {model.loaded()[-1]})" for model in models.all())
        scheme = "http" if access.tls is None else "https"
        print(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1/models serves {told}", flush=True)
        await stop.wait()
        logger.info("ends: no new connections; running requests have up to %g seconds", seconds)
        await site.stop()
        await app.answered(seconds + 1)  # they end by themselves, or are refused, within their time
    finally:
        refreshing.cancel()
        await runner.cleanup()
