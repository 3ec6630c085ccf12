"""What every request has to pass before it reaches an endpoint: where it comes from, and how much it brings.

Knows HTTP headers and bodies. Does not know keys or endpoints. A page of another origin can make a browser send
requests to this machine, and a name that points here can make it believe that it may read the answers; so both are
refused by their headers, whatever the method.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from headwater.errors import HeadwaterError
from headwater.server.refused import Refused, refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SWALLOWED = 32
"""How many times the limit is read of a body that is refused, so that its sender gets to read why."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
EXPOSED = "x-headwater-session, x-headwater-how, x-headwater-fed, x-headwater-held"


class Guard:
    """`hosts` are the names under which the server may be addressed, beside those of this machine; `origins` the pages
    that may use it, beside its own; `body_s` how long to wait for the next piece of a body. A server with keys
    (`keyed`) may be addressed by any name."""

    def __init__(
        self,
        app: App,
        *,
        body_bytes: int,
        hosts: tuple[str, ...],
        origins: tuple[str, ...],
        keyed: Callable[[], bool],
        body_s: float,
    ) -> None:
        self._app, self._body_bytes, self._hosts, self._origins = app, body_bytes, hosts, origins
        self._keyed, self._body_s = keyed, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        allowed = origin if origin is not None and origin in self._origins else None
        answer = self._answering(send, allowed)
        try:
            self._check_place(headers, origin)
            if allowed is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(answer)
                return
            length = headers.get("content-length", "0")
            if not length.isdigit() or int(length) > self._body_bytes:
                await self._swallow(receive)
                raise self._too_large()
        except (Refused, HeadwaterError) as error:
            await _say(answer, refusal(error))
            return
        await self._app(scope, self._limited(receive), answer)

    def _check_place(self, headers: dict[str, str], origin: str | None) -> None:
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or "" if _plain(host) else ""
        if not self._keyed() and not (_here(name) or name in self._hosts):
            raise Refused(
                403,
                f"this server is not addressed as {host[:80]!r}; use 127.0.0.1 or localhost, or start it with "
                "--allow-host",
                code="host_not_allowed",
            )
        if origin is None or origin in self._origins:
            return
        if not (_plain(host) and urlsplit(origin).netloc == host):
            raise Refused(
                403,
                f"a page of {origin[:80]!r} may not use this server; start it with --allow-origin to let it",
                code="origin_not_allowed",
            )

    def _limited(self, receive: Receive) -> Receive:
        """The body, up to the limit and not slower than it may come."""
        taken, more = 0, True

        async def limited() -> MutableMapping[str, Any]:
            nonlocal taken, more
            if not more:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._body_s)
            except TimeoutError:
                raise HTTPException(408, f"the rest of the request did not come in {self._body_s:g} s") from None
            if message["type"] == "http.request":
                more = message.get("more_body", False)
                taken += len(message.get("body", b""))
                if taken > self._body_bytes:
                    await self._swallow(receive, more=more)
                    more = False
                    raise HTTPException(413, self._too_large().message)
            return message

        return limited

    async def _swallow(self, receive: Receive, *, more: bool = True) -> None:
        taken = 0
        while more and taken < SWALLOWED * self._body_bytes:
            try:
                message = await asyncio.wait_for(receive(), self._body_s)
            except TimeoutError:
                return
            more = message["type"] == "http.request" and message.get("more_body", False)
            taken += len(message.get("body", b""))

    def _too_large(self) -> Refused:
        return Refused(413, f"the request is larger than {self._body_bytes:,} bytes", code="request_too_large")

    def _answering(self, send: Send, allowed: str | None) -> Send:
        """Every answer with the headers that keep a browser in bounds."""

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                extra = {name: value for name, value in HEADERS.items() if name.encode() not in there}
                if allowed is not None:
                    extra |= {"access-control-allow-origin": allowed, "vary": "origin"}
                    extra["access-control-expose-headers"] = EXPOSED
                    extra["cross-origin-resource-policy"] = "cross-origin"
                pairs = [(name.encode(), value.encode("latin-1")) for name, value in extra.items()]
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        return answer


async def _preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST, PATCH, PUT, DELETE"),
        (b"access-control-allow-headers", b"authorization, content-type, x-headwater-session, x-headwater-history"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _say(send: Send, refused: Refused) -> None:
    body = json.dumps(refused.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in refused.headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _plain(host: str) -> bool:
    """Whether it is a name or address with a port or without, and nothing else."""
    return bool(host) and not set(host) & set("/@?#\\ ")


def _here(name: str) -> bool:
    """Whether it is a name of this machine for itself."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
