"""`/healthz`, `/readyz` and `/metrics`: how the server is.

Knows what to ask the service. Does not know conversations.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from headwater.server.door import Owner, Server

router = APIRouter(tags=["State"])


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """Whether the process is alive."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "It does not take requests now."}})
def readyz(server: Server) -> JSONResponse:
    """Whether requests are taken: the model is loaded and driven, and the server is not shutting down."""
    ready = server.worker.alive and not server.draining
    status = "ready" if ready else "shutting down" if server.draining else "the model's thread has ended"
    return JSONResponse({"status": status, "model": server.engine.name}, status_code=200 if ready else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(server: Server, owner: Owner) -> Response:
    """Figures for Prometheus."""
    gauges = server.metrics.gauges
    for name, value in (await server.call(server.figures)).items():
        gauges[name].set(value)
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
