"""The URLs of a server: TensorFlow Serving's REST, control of models, and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from aiohttp import web

from sok.tools.serving import control
from sok.tools.serving.access import Access
from sok.tools.serving.gate import Gate, Limits
from sok.tools.serving.metrics import CONTENT_TYPE, Metrics
from sok.tools.serving.models import Models
from sok.tools.serving.predicting import Answered, metadata, predict
from sok.tools.serving.refusal import Refused

logger = logging.getLogger("sok.serve")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MODEL = r"/v1/models/{name:[^/:]+}"
_VERSION = _MODEL + r"/versions/{version:[0-9]+}"
_VERBS = ("predict", "classify", "regress", "load", "unload")


class App:
    """Answers requests. TensorFlow runs in threads of its own: the event loop never waits for a model.

    Args:
        models: what is served.
        limits: what is refused.
        metrics: what counts.
        access: who may ask, and who may load and unload.
    """

    def __init__(self, models: Models, limits: Limits, metrics: Metrics, access: Access) -> None:
        self._models, self._limits, self._metrics = models, limits, metrics
        self._access = access
        self._gate = Gate(limits.requests, metrics.running)
        self._answering = 0
        self._pool = ThreadPoolExecutor(limits.threads, "predict")
        self._loading = ThreadPoolExecutor(1, "load")

    def application(self) -> web.Application:
        """What aiohttp runs."""
        app = web.Application(
            client_max_size=self._limits.request_bytes, middlewares=[self._counted, _told_as_json, self._allowed]
        )
        for way in (_MODEL, _VERSION):
            app.router.add_get(way, self._status)
            app.router.add_get(f"{way}/metadata", self._metadata)
            app.router.add_post(f"{way}:{{verb:[a-z]+}}", self._verb)
        app.router.add_route("*", _MODEL + "/labels/{rest:.*}", _no_labels)
        app.router.add_get("/v1/models", self._list)
        for path in ("/metrics", "/monitoring/prometheus/metrics"):
            app.router.add_get(path, self._tell_metrics)
        return app

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._answering += 1
        try:
            return await handler(request)
        finally:
            self._answering -= 1

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_control = request.match_info.get("verb") in control.COMMANDS
        self._access.check(request.headers.get("Authorization"), is_control)
        return await handler(request)

    async def answered(self, seconds: float) -> None:
        """Waits until no request is being answered, for so many seconds at the most."""
        ends = time.monotonic() + seconds
        while self._answering and time.monotonic() < ends:
            await asyncio.sleep(0.02)

    def close(self, seconds: float) -> bool:
        """Ends the threads; False if one is still at work after so long."""

        def shut() -> None:
            for pool in (self._pool, self._loading):
                pool.shutdown(cancel_futures=True)

        waiter = threading.Thread(target=shut, name="shut", daemon=True)
        waiter.start()
        waiter.join(seconds)
        return not waiter.is_alive()

    async def _status(self, request: web.Request) -> web.Response:
        return _json(self._models[request.match_info["name"]].status(_version(request)))

    async def _metadata(self, request: web.Request) -> web.Response:
        return _json(metadata(self._models[request.match_info["name"]], _version(request)))

    async def _list(self, request: web.Request) -> web.Response:
        models = [{"name": model.name, "path": model.path, **model.status()} for model in self._models.all()]
        return _json({"models": models})

    async def _tell_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _verb(self, request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        if verb == "predict":
            return await self._predict(request)
        if verb in ("classify", "regress"):
            raise Refused(501, f":{verb} takes tf.Examples, which are not offered here. Ask :predict.")
        if verb not in _VERBS:
            raise Refused(404, f"There is no :{verb}. There are: {', '.join(':' + known for known in _VERBS)}.")
        if not self._access.with_control:
            raise Refused(403, f":{verb} is offered where the server was started with --control.")
        if "Origin" in request.headers:
            raise Refused(403, f":{verb} is not for pages in browsers.")
        name, version = request.match_info["name"], _version(request)
        body = await self._body(request)
        told = self._loading.submit(control.COMMANDS[verb], self._models, name, version, body)
        return _json(await asyncio.wrap_future(told))

    async def _predict(self, request: web.Request) -> web.Response:
        start = time.perf_counter()
        name, version, status = "", None, 499  # what nginx says where the client has gone
        try:
            wanted = _version(request)
            model = self._models[request.match_info["name"]]
            name = model.name  # of models that are known alone: names that clients invent would fill Prometheus
            answered = await self._answered(lambda body: predict(model, wanted, body), request)
            version, status = answered.version, 200
            return web.Response(body=answered.body, content_type="application/json")
        except Refused as refused:
            version, status = refused.version, refused.status
            raise
        except Exception as error:
            status = getattr(error, "status", 500)  # aiohttp's own errors have one
            raise
        finally:
            self._metrics.answered(name, version, "predict", status, time.perf_counter() - start)

    async def _answered(self, work: Callable[[bytes], Answered], request: web.Request) -> Answered:
        """What `work` makes of the request's body in a thread, within the limits."""
        deadline = time.monotonic() + self._limits.seconds
        self._gate.enter()
        future: Future[Answered] | None = None
        try:
            body = await self._body(request)
            future = self._pool.submit(work, body)
            # From now on the thread says when the request has ended: TensorFlow cannot be stopped in between.
            future.add_done_callback(lambda _: self._gate.leave())
        finally:
            if future is None:
                self._gate.leave()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            words = f"No answer within {self._limits.seconds:g} seconds (--timeout-seconds)."
            raise Refused(504, words) from None

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await asyncio.wait_for(request.read(), self._limits.seconds)
        except asyncio.TimeoutError:
            words = f"The request did not arrive within {self._limits.seconds:g} seconds (--timeout-seconds)."
            raise Refused(408, words) from None
        except web.HTTPRequestEntityTooLarge:
            most = self._limits.request_bytes
            raise Refused(413, f"The request is larger than {most:,} bytes (--max-request-bytes).") from None


async def _no_labels(request: web.Request) -> web.Response:
    raise Refused(404, "Versions have no labels here. Ask for /versions/N, or for the newest without it.")


def _version(request: web.Request) -> int | None:
    text = request.match_info.get("version")
    return None if text is None else int(text[:20])


def _json(told: Any, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(told, indent=1) + "\n", status=status, content_type="application/json")


@web.middleware
async def _told_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is {"error": words}."""
    try:
        return await handler(request)
    except Refused as refused:
        answer = _json({"error": str(refused)}, refused.status)
        if refused.status == 401:
            answer.headers["WWW-Authenticate"] = 'Bearer realm="sok serve"'
        return answer
    except web.HTTPException as error:
        words = f"{request.method} {request.path}: {error.reason}. docs/serving.md has the URLs."
        answer = _json({"error": words}, error.status)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except Exception as error:
        logger.exception("%s %s", request.method, request.path)
        return _json({"error": f"{type(error).__name__}: {error}"}, 500)
