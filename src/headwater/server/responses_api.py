"""`/v1/responses`: answers that a client goes on from by their id.

Knows the shape of OpenAI's responses and their events. Does not know how an answer is generated. Nothing is stored for
it: an id says which conversation of which session it is and after which turn, and the journal has the rest.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from headwater.server.chat_api import (
    Named,
    check_model,
    failure,
    first,
    most_tokens,
    sse,
    told,
    whole,
)
from headwater.server.door import Owner, Server
from headwater.server.history import History, exchanges_of
from headwater.server.job import Asked, Done, Event, Failed, Piece, Question
from headwater.server.refused import Refused
from headwater.server.service import Service
from headwater.server.sessions import Sessions, sampled
from headwater.server.wire import (
    EVENTS,
    Drawing,
    Message,
    TextPart,
    Wire,
    history_of,
    refuse_unsupported,
    session_named,
)

router = APIRouter(tags=["OpenAI"])
LONGEST_ID = 200


class Part(Wire):
    """A part of an item: text, of the user or of an answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Wire):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: str | None = None


class ResponseRequest(Drawing):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=LONGEST_ID)] | None = None
    conversation: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    store: bool | None = None
    metadata: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    text: Any = None
    reasoning: Any = None
    truncation: Any = None
    include: Any = None
    background: Any = None
    max_tool_calls: Any = None
    service_tier: Any = None
    top_logprobs: Any = None
    prompt: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    stream_options: Any = None


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "text": ({"format": {"type": "text"}}, {}),
    "reasoning": ({},),
    "truncation": ("disabled", "auto"),
    "include": ([],),
    "background": (False,),
    "max_tool_calls": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "prompt": (),
    "prompt_cache_key": (),
    "safety_identifier": (),
    "stream_options": ({},),
}
"""As in `wire`. Nothing is ever truncated here, so either way of doing it is right."""


@router.post("/v1/responses", responses=EVENTS)
async def create_response(
    body: ResponseRequest, request: Request, server: Server, owner: Owner, x_headwater_session: Named = None
) -> Any:
    """An answer, after `previous_response_id` or after what `input` holds itself.

    A session keeps its system prompt, so `instructions` need not be sent again; other ones make a new session.
    """
    refuse_unsupported(body, NEUTRAL)
    check_model(server, body.model)
    history, text = history_of(_messages(body))
    if body.previous_response_id is not None:
        history = await server.call(lambda: _before(server.sessions(owner), body, history))
    named = session_named(None if x_headwater_session is None else unquote(x_headwater_session), body.user)
    answering = server.ask(
        owner,
        Question(
            history=history,
            text=text,
            sampling=sampled(server.manner, body.sampling),
            max_tokens=most_tokens(server, body.max_output_tokens, "max_output_tokens"),
            session=body.conversation if named is None else named,
            kept=body.store is not False,
            alone=body.store is False,
        ),
    )
    asked = await first(answering, request)
    tell = _Response(server, body, asked)
    if not body.stream:
        events = await whole(answering, request)
        return JSONResponse(tell.whole(events), headers=told(asked))

    async def lines() -> AsyncIterator[str]:
        over, said = False, []
        try:
            for event in tell.opening():
                yield _named_sse(event)
            async for event in answering.events():
                over = isinstance(event, (Done, Failed))
                said.append(event)
                if (failed := failure(event, answering.timeout_s)) is not None:
                    yield _named_sse(tell.event("error", **failed.body["error"]))
                    return
                for out in tell.during(event, said):
                    yield _named_sse(out)
        finally:
            if not over:
                answering.end("left")

    return StreamingResponse(lines(), media_type="text/event-stream", headers=told(asked))


@router.get("/v1/responses/{response}")
async def show_response(response: str, server: Server, owner: Owner) -> dict[str, Any]:
    """A response that was given."""

    def read() -> dict[str, Any]:
        name, chapter, turn = _place(server.sessions(owner), response)
        with server.sessions(owner).store.reading(name) as opened:
            if turn >= opened.journal.count(chapter):
                raise _unknown(response)
            entry = opened.journal.entry(chapter, turn)
        reason = "stop" if entry.turn.finished else "length"
        tokens = int(entry.details.get("tokens", 0))
        return {
            **_shape(response, server.engine.name, entry.created, reason),
            "output": [_message(response, entry.turn.text, "completed" if reason == "stop" else "incomplete")],
            "usage": _usage(entry.turn.start, 0, tokens),
        }

    return await server.call(read)


def _messages(body: ResponseRequest) -> list[Message]:
    """The input as messages of a chat, after the instructions."""
    if isinstance(body.input, str):
        said = [Message(role="user", content=body.input)]
    else:
        said = [
            Message(
                role=item.role,
                content=item.content
                if isinstance(item.content, str)
                else [TextPart(type="text", text=part.text) for part in item.content],
            )
            for item in body.input
        ]
    if body.instructions is not None:
        said.insert(0, Message(role="system", content=body.instructions))
    return said


def _before(sessions: Sessions, body: ResponseRequest, new: History) -> History:
    """What was said up to a response, and what the request adds to it."""
    given = body.previous_response_id or ""
    name, chapter, turn = _place(sessions, given)
    with sessions.store.reading(name) as opened:
        began = opened.journal.chapter(chapter)
        texts = [entry.turn.text for entry in opened.journal.entries(chapter, 0, turn + 1)]
    if began is None or len(texts) != turn + 1:
        raise _unknown(given)
    if new.lone_answer is not None:
        raise Refused(400, "input begins with an answer; begin with the user's message.", param="input")
    system = began.system if new.system is None else new.system
    return History(system=system, exchanges=(*exchanges_of(texts), *new.exchanges))


def _place(sessions: Sessions, response: str) -> tuple[str, int, int]:
    """The session, the conversation in it and the turn that an id means. Raises Refused."""
    kind, *parts = response.split("_")
    if kind != "resp" or len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts[1:]):
        raise _unknown(response)
    name = sessions.name_of(parts[0])
    if name is None or len(parts[1]) > 9 or len(parts[2]) > 9 or int(parts[2]) % 2 == 0:
        raise _unknown(response)
    return name, int(parts[1]), int(parts[2])


def _unknown(response: str) -> Refused:
    return Refused(
        404,
        f"Response with id {response[:LONGEST_ID]!r} not found; its session may have been deleted.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


class _Response:
    """An answer in the shape of a response, whole or in events."""

    def __init__(self, server: Service, body: ResponseRequest, asked: Asked) -> None:
        self._model, self._body, self._asked = server.engine.name, body, asked
        self._id = "resp_" + asked.conversation.replace("/", "_") + f"_{asked.turn}"
        self._created = int(time.time())
        self._count = 0

    def whole(self, events: list[Event]) -> dict[str, Any]:
        done = events[-1] if isinstance(events[-1], Done) else None
        text = "".join(event.text for event in events if isinstance(event, Piece))
        reason = "stop" if done is None else done.reason
        status = "completed" if reason == "stop" else "incomplete"
        return {
            **self._base(status),
            "incomplete_details": None if reason == "stop" else {"reason": "max_output_tokens"},
            "output": [_message(self._id, text, status)],
            "usage": _usage(self._asked.prompt_tokens, self._asked.fed, 0 if done is None else done.tokens),
        }

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first piece."""
        begun = {**self._base("in_progress"), "output": [], "usage": None}
        part = {"type": "output_text", "text": "", "annotations": []}
        return [
            self.event("response.created", response=begun),
            self.event("response.in_progress", response=begun),
            self.event("response.output_item.added", output_index=0, item=_message(self._id, None, "in_progress")),
            self.event("response.content_part.added", **self._where, part=part),
        ]

    def during(self, event: Event, said: list[Event]) -> list[dict[str, Any]]:
        """The events for a piece, or for the end."""
        if isinstance(event, Piece):
            return [self.event("response.output_text.delta", **self._where, delta=event.text, logprobs=[])]
        if not isinstance(event, Done):
            return []
        response = self.whole(said)
        item = response["output"][0]
        (part,) = item["content"]
        last = "response.completed" if event.reason == "stop" else "response.incomplete"
        return [
            self.event("response.output_text.done", **self._where, text=part["text"], logprobs=[]),
            self.event("response.content_part.done", **self._where, part=part),
            self.event("response.output_item.done", output_index=0, item=item),
            self.event(last, response=response),
        ]

    def event(self, kind: str, **content: Any) -> dict[str, Any]:
        """An event with its number."""
        self._count += 1
        return {**content, "type": kind, "sequence_number": self._count - 1}

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": _item_id(self._id), "output_index": 0, "content_index": 0}

    def _base(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            **_shape(self._id, self._model, self._created, "stop"),
            "status": status,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "user": body.user,
            "headwater": {"session": self._asked.session, "how": self._asked.how, "fed_tokens": self._asked.fed},
        }


def _shape(response: str, model: str, created: Any, reason: str) -> dict[str, Any]:
    return {
        "id": response,
        "object": "response",
        "created_at": created,
        "status": "completed" if reason == "stop" else "incomplete",
        "error": None,
        "incomplete_details": None if reason == "stop" else {"reason": "max_output_tokens"},
        "model": model,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
    }


def _message(response: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": _item_id(response), "type": "message", "role": "assistant", "status": status, "content": content}


def _item_id(response: str) -> str:
    return response.replace("resp_", "msg_", 1)


def _usage(prompt: int, fed: int, tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": max(0, prompt - fed)},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + tokens,
    }


def _named_sse(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\n{sse(event)}"
