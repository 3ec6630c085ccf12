"""`/api/sessions` and `/api/settings`: what is kept, what it holds, and how conversations are held.

Knows what a page shows. Does not know how an answer is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from headwater.chat.exchange import as_json_lines, as_markdown
from headwater.chat.store import Listed, Store
from headwater.errors import UnsupportedCall, UsageError
from headwater.policies import POLICIES, Policy, require
from headwater.policies import policy as make_policy
from headwater.server.door import Owner, Server
from headwater.server.refused import Refused
from headwater.server.service import LOCAL, Service
from headwater.server.sessions import Manner, Sessions
from headwater.server.wire import Wire

router = APIRouter(prefix="/api", tags=["Headwater"])
MOST_TURNS = 1000


class Renamed(Wire):
    """What to call a session."""

    name: Annotated[str, Field(min_length=1, max_length=64)]


class Changed(Wire):
    """How conversations are held from now on; what is left out stays."""

    policy: str | None = None
    budget: Annotated[int, Field(ge=1)] | None = None
    sinks: Annotated[int, Field(ge=0)] | None = None


@router.get("/sessions")
async def list_sessions(server: Server, owner: Owner, search: str = "") -> dict[str, Any]:
    """The key's sessions, the one used last first; with `search`, those in whose name or messages it stands."""
    sessions = await server.call(lambda: server.sessions(owner))
    found = None if not search else await asyncio.to_thread(_found, sessions.store, search.casefold())
    listed = await asyncio.to_thread(sessions.store.list)
    return await server.call(
        lambda: {"sessions": [_listed(sessions, each) for each in listed if found is None or each.name in found]}
    )


def _found(store: Store, wanted: str) -> set[str]:
    """The names of the sessions in which a text stands."""
    return {said.name for said in store.said() if any(wanted in text.casefold() for text in (said.name, *said.texts))}


def _listed(sessions: Sessions, each: Listed) -> dict[str, Any]:
    live = sessions.shelf.peek(sessions.uid(each.name)) if each.name in sessions else None
    return {
        "name": each.name,
        "title": sessions.title(each.name),
        "turns": each.turns,
        "created": each.created,
        "updated": each.updated,
        "snapshot_bytes": each.snapshot_bytes,
        "in_memory": live is not None,
        "busy": live is not None and live.busy,
    }


@router.get("/sessions/{name}")
async def show_session(name: str, server: Server, owner: Owner, turns: bool = True) -> dict[str, Any]:
    """What a session holds, and its latest messages."""
    sessions = await server.call(lambda: server.sessions(owner))
    shown = await server.call(lambda: _state(sessions, name))
    return shown if not turns else {**shown, **await asyncio.to_thread(_said, sessions.store, name, shown["state"])}


def _state(sessions: Sessions, name: str) -> dict[str, Any]:
    live = sessions.shelf.peek(sessions.uid(name))
    if live is None:
        return {"name": name, "in_memory": False, "state": None}
    now = live.chat.stats()
    state = {field.name: getattr(now, field.name) for field in fields(now)}
    return {"name": name, "in_memory": True, "state": {**state, "busy": live.busy, "surprise": live.surprise}}


def _said(store: Store, name: str, state: dict[str, Any] | None) -> dict[str, Any]:
    """The messages, read beside the worker; whether each is held is that of `state`."""
    with store.reading(name) as opened:
        journal, chapter = opened.journal, opened.journal.chapter()
        if chapter is None:
            return {"system": None, "messages": []}
        count = journal.count(chapter.number)
        entries = list(journal.entries(chapter.number, max(0, count - MOST_TURNS)))
    return {
        "system": chapter.system,
        "messages": [
            {
                "number": entry.number,
                "role": entry.turn.role,
                "content": entry.turn.text,
                "tokens": entry.turn.stop - entry.turn.start,
                "finished": entry.turn.finished,
                "created": entry.created,
                "held": None if state is None else entry.number >= state["evicted_turns"],
                "recalled": len(entry.details.get("recalled", ())),
            }
            for entry in entries
        ],
    }


@router.patch("/sessions/{name}")
async def rename_session(name: str, body: Renamed, server: Server, owner: Owner) -> dict[str, Any]:
    """Call it something else."""
    await server.call(lambda: server.sessions(owner).rename(name, body.name))
    return {"name": body.name}


@router.delete("/sessions/{name}", status_code=204)
async def delete_session(name: str, server: Server, owner: Owner) -> Response:
    """Delete it for good."""
    await server.call(lambda: server.sessions(owner).delete(name))
    return Response(status_code=204)


@router.get("/sessions/{name}/export", response_class=StreamingResponse)
async def export_session(
    name: str, server: Server, owner: Owner, kind: Literal["jsonl", "markdown"] = "jsonl"
) -> StreamingResponse:
    """Every message of it, as `headwater sessions export` writes them."""
    sessions = await server.call(lambda: server.sessions(owner))
    pieces = await asyncio.to_thread(_exported, sessions.store, name, kind)
    ending = "jsonl" if kind == "jsonl" else "md"
    return StreamingResponse(
        iter(pieces),
        media_type="application/jsonl" if kind == "jsonl" else "text/markdown; charset=utf-8",
        headers={"content-disposition": f'attachment; filename="session.{ending}"'},
    )


def _exported(store: Store, name: str, kind: str) -> list[str]:
    with store.reading(name) as opened:
        pieces: Iterator[str] = as_json_lines(opened) if kind == "jsonl" else as_markdown(opened)
        return [piece + ("\n" if kind == "jsonl" else "\n\n") for piece in pieces]


@router.get("/settings")
async def show_settings(server: Server, owner: Owner) -> dict[str, Any]:
    """How conversations are held, and what one costs."""
    return await server.call(lambda: _settings(server))


def _settings(server: Service) -> dict[str, Any]:
    policy, sampling = server.manner.policy, server.manner.sampling
    return {
        "model": server.engine.name,
        "context_length": server.engine.context_length,
        "policy": policy.name,
        "policies": [name for name, kind in POLICIES.items() if _live(kind, server)],
        "budget": policy.budget,
        "sinks": getattr(policy, "sinks", 0),
        "memory": server.options.memory,
        "max_tokens": server.manner.max_tokens,
        "sampling": {field.name: getattr(sampling, field.name) for field in fields(sampling)},
        "token_bytes": server.token_bytes,
        "session_bytes": server.shelf.session_bytes,
        "memory_bytes": server.options.memory_bytes,
        "used_bytes": server.shelf.nbytes,
    }


def _live(kind: type[Policy[Any]], server: Service) -> bool:
    """Whether conversations can be held by it: it looks at no attention that this engine does not supply."""
    try:
        require(kind(), server.engine.supplies)
        kind().window()
    except UnsupportedCall:
        return False
    return True


@router.put("/settings")
async def change_settings(body: Changed, server: Server, owner: Owner) -> dict[str, Any]:
    """Hold conversations in another way. Those in memory are saved; their caches are made again when they go on.

    On a server with keys, the way is that of its command line.
    """
    if owner != LOCAL:
        raise Refused(403, "a server with keys is set by whoever starts it", code="settings_not_allowed")

    def change() -> dict[str, Any]:
        now = server.manner
        name = body.policy or now.policy.name
        given: dict[str, Any] = {"budget": body.budget or now.policy.budget}
        sinks = body.sinks if body.sinks is not None else getattr(now.policy, "sinks", None)
        if any(field.name == "sinks" for field in fields(POLICIES.get(name, type(now.policy)))):
            given |= {} if sinks is None else {"sinks": sinks}
        elif body.sinks:
            raise UsageError(f"policy {name!r} has no sinks; leave sinks out, or take streaming-llm")
        server.change(
            Manner(
                policy=make_policy(name, **given),
                sampling=now.sampling,
                max_tokens=now.max_tokens,
                memory_tokens=now.memory_tokens,
            )
        )
        return _settings(server)

    return await server.call(change)
