"""The page: a few files of the package, known by name.

Knows which there are. Does not know what they do. Nothing in a request is ever a path.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

router = APIRouter(include_in_schema=False)
KINDS = {
    "index.html": "text/html; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "markdown.js": "text/javascript; charset=utf-8",
    "map.js": "text/javascript; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def _file(name: str) -> Response:
    content = files("headwater.server").joinpath("static", name).read_bytes()
    return Response(content, media_type=KINDS[name])


def _add(path: str, name: str) -> None:
    router.add_api_route(path, lambda: _file(name), methods=["GET"], name=name)


for _name in KINDS:
    _add(f"/static/{_name}", _name)
_add("/", "index.html")
_add("/docs", "docs.html")
_add("/favicon.ico", "icon.svg")
