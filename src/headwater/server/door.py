"""What every endpoint is handed: the service, and whose request it is.

Knows FastAPI's dependencies. Does not know any endpoint.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from headwater.server.service import Service

_scheme = HTTPBearer(auto_error=False, description="A key of `headwater keys add`, where the server has any.")


def _server(request: Request) -> Service:
    return request.app.state.service


Server = Annotated[Service, Depends(_server)]


def _owner(request: Request, server: Server, _: Annotated[object, Depends(_scheme)]) -> str:
    owner = server.owner(request.headers.get("authorization"))
    server.count(owner)
    return owner


Owner = Annotated[str, Depends(_owner)]
"""Whose sessions a request is about. Counts the request."""
