"""The server's endpoints brought together, and how an error of any of them reaches the client.

Knows FastAPI. Does not know what an endpoint does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headwater import __version__
from headwater.errors import HeadwaterError
from headwater.server import chat_api, page, responses_api, sessions_api, state_api
from headwater.server.guard import Guard
from headwater.server.refused import Refused, place_of, refusal
from headwater.server.service import Service
from headwater.server.wire import Trouble

log = logging.getLogger("headwater.server")
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Trouble, "description": "What is wrong with the request, in the original's shape."},
    "5XX": {"model": Trouble, "description": "The server could not; the session is whole."},
}


def create_app(service: Service) -> FastAPI:
    """The application; it starts the service and stops it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        for trouble in await asyncio.to_thread(service.stop):
            log.error("at the end: %s", trouble)

    app = FastAPI(
        title="Headwater",
        version=__version__,
        summary="A language model's conversations, without end in a fixed amount of KV cache.",
        lifespan=lifespan,
        responses=ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    for router in (state_api.router, chat_api.router, responses_api.router, sessions_api.router, page.router):
        app.include_router(router)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HeadwaterError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    options = service.options
    app.add_middleware(_Outcome, service=service)
    app.add_middleware(
        Guard,  # pyright: ignore[reportArgumentType]
        body_bytes=options.body_bytes,
        body_s=options.body_s,
        hosts=options.hosts,
        origins=options.origins,
        keyed=lambda: bool(service.keys.all()),
    )
    return app


class _Outcome:
    """Counts requests by endpoint and status, and answers for what nobody expected."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._metrics = app, service.metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: list[int] = []

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            log.error("a defect: %s at %s", type(error).__name__, place_of(error))
            if not status:
                await JSONResponse(refusal(error).body, status_code=500)(scope, receive, counted)
        finally:
            route = scope.get("route")
            self._metrics.requests.labels(getattr(route, "path", "other"), str(status[0] if status else 499)).inc()


def _refused(_: Request, error: Exception) -> JSONResponse:
    refused = refusal(error)
    if refused.status >= 500:
        log.error("%s: %s", type(error).__name__, error)
    return JSONResponse(refused.body, status_code=refused.status, headers=refused.headers)


def _invalid(_: Request, error: Any) -> JSONResponse:
    """The first thing that is wrong with a request, named."""
    found = error.errors()[0]
    where = [part for part in found["loc"] if part != "body"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
    if found["type"] == "extra_forbidden":
        said, code = f"Unrecognized request argument supplied: {field}", "unknown_parameter"
    elif found["type"] == "missing" and where:
        said, code = f"Missing required parameter: '{field}'.", "missing_required_parameter"
    elif not where or found["type"] == "json_invalid":
        said, code, field = f"The body of the request is not JSON: {found['msg']}.", "invalid_json", ""
    else:
        said, code = f"Invalid '{field}': {found['msg']}.", "invalid_value"
    return _refused(_, Refused(400, said, param=field or None, code=code))


def _http(_: Request, error: Any) -> JSONResponse:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    refused = Refused(error.status_code, str(error.detail), kind=kind, headers=error.headers)
    return _refused(_, refused)
