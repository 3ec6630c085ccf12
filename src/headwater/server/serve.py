"""The server as a process: its socket, its log, its signals and what it says when it begins.

Knows uvicorn. Does not know endpoints. A signal ends it in three steps: no new connections, the answers under way end
by themselves or are ended, and every conversation is saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from headwater.chat.sampling import Sampling
from headwater.chat.screen import size
from headwater.engines import open_engine
from headwater.engines.default import default_engine
from headwater.errors import HeadwaterError, UsageError
from headwater.policies import policy as make_policy
from headwater.server.app import create_app
from headwater.server.keys import Keys, server_dir
from headwater.server.limits import Limits
from headwater.server.service import MOST_TOKENS, Options, Service
from headwater.server.sessions import Manner

DRAIN_S = 20.0
"""How long answers under way may take when the server is told to end."""
MOST_CONNECTIONS = 20_000


class PortTaken(HeadwaterError):
    """The address cannot be listened on."""


def run(
    *,
    model: str,
    engine: str | None,
    host: str,
    port: int,
    policy: str,
    budget: int,
    sinks: int | None,
    max_tokens: int,
    memory: bool,
    memory_bytes: int,
    timeout_s: float,
    origins: tuple[str, ...] = (),
    hosts: tuple[str, ...] = (),
    limits: Limits | None = None,
    folder: Path | None = None,
    drain_s: float = DRAIN_S,
    **engine_options: Any,
) -> int:
    """Serve until a signal comes. Returns the exit code.

    Raises UsageError for an address other than this machine's own without a key, PortTaken, and what loading a model
    raises.
    """
    place = server_dir() if folder is None else folder
    keys = Keys(place)
    if not _loopback(host) and not keys.all():
        raise UsageError(
            f"anybody who reaches {host} could use this server; make a key first: headwater keys add NAME, or listen "
            "on 127.0.0.1"
        )
    given = {"budget": budget} | ({} if sinks is None else {"sinks": sinks})
    manner = Manner(policy=make_policy(policy, **given), sampling=Sampling(), max_tokens=max_tokens)
    options = Options(
        folder=place,
        memory=memory,
        memory_bytes=memory_bytes,
        timeout_s=timeout_s,
        most_tokens=max(max_tokens, MOST_TOKENS),
        limits=limits or Limits(),
        origins=origins,
        hosts=hosts,
    )
    with listening(host, port) as listener:
        engine = default_engine(model, manner.policy) if engine is None else engine
        opened = open_engine(model, engine=engine, **engine_options)
        try:
            service = Service(opened, manner, options, keys=keys)
            _open_files()
            config = uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                lifespan="on",
                limit_concurrency=MOST_CONNECTIONS,
                timeout_keep_alive=75,
                server_header=False,
                ws="none",
            )
            _say(service, listener, keys, engine)
            return _Server(config, service, drain_s).serve_on(listener)
        finally:
            opened.close()


class _Server(uvicorn.Server):
    """Ends in order, with exit code 0, when it is told to."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = service, drain_s

    def serve_on(self, listener: socket.socket) -> int:
        """Serve on a socket that is bound; returns the exit code."""
        self.run(sockets=[listener])
        return 0 if self.started else 1

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's own, without raising the signal once more at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, let answers end, save."""
        self._service.draining = True
        logging.getLogger("headwater.server").info("ending; answers have %g s", self._drain_s)

        async def hurry() -> None:
            await asyncio.sleep(self._drain_s)
            self._service.worker.end_all("shutdown")

        hurrying = asyncio.create_task(hurry())
        try:
            await super().shutdown(sockets)
        finally:
            hurrying.cancel()


def listening(host: str, port: int) -> contextlib.closing[socket.socket]:
    """A socket to serve on. Raises PortTaken.

    It says that it is TCP: asyncio sends small pieces at once on sockets that do, and others wait 40 ms for each.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"cannot listen on {host} port {port}: {error.strerror}; take another with --port (0 is any that is free)"
        ) from error
    return contextlib.closing(listener)


def _say(service: Service, listener: socket.socket, keys: Keys, engine: str) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    policy, names = service.manner.policy, [key.name for key in keys.all()]
    apart = service.engine.apart
    together = "computed together" if apart is None else f"computed one after another ({apart})"
    lines = [
        f"model     {service.engine.name} on {engine}, {policy.name}, budget {policy.budget} tokens",
        f"a session {size(service.shelf.session_bytes)} of cache; {size(service.options.memory_bytes)} for all",
        f"answers   {together}, up to {service.options.most_active} at a time",
        f"API       http://{shown}:{port}/v1",
        f"page      http://{shown}:{port}/",
        f"keys      {', '.join(names) if names else 'none; only this machine can reach it'}",
        f"sessions  {service.options.folder}",
    ]
    print("\n".join(lines), flush=True)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _open_files() -> None:
    """As many sockets as the system allows."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def log_to_stderr(*, verbose: bool) -> None:
    """Lines without a word of what was said; warnings alone, unless `verbose`."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("headwater").setLevel(logging.INFO if verbose else logging.WARNING)
