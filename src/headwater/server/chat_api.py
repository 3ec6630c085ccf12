"""`/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/v1/embeddings`.

Knows OpenAI's answers and streams. Does not know sessions or models.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

import numpy as np
from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from headwater.chat.reader import checked_stops
from headwater.engines.base import Engine
from headwater.server.door import Owner, Server
from headwater.server.job import Asked, Done, Event, Failed, Likely, Piece, Question
from headwater.server.refused import Refused, refusal
from headwater.server.service import Answering, Service, ended
from headwater.server.sessions import sampled
from headwater.server.wire import (
    EVENTS,
    ChatRequest,
    CompletionRequest,
    Wire,
    history_of,
    one_of,
    refuse_unsupported,
    session_named,
)

router = APIRouter()
Named = Annotated[str | None, Header(description="The session to go on with, or to begin under this name.")]


Whole = Annotated[
    Literal["whole"] | None,
    Header(description="Says that the messages are all there is in the session that is named: it takes back the rest."),
]


@router.get("/v1/models", tags=["OpenAI"])
def list_models(server: Server, owner: Owner) -> dict[str, Any]:
    """The model that is loaded."""
    return {"object": "list", "data": [_model(server)]}


@router.get("/v1/models/{model:path}", tags=["OpenAI"])
def show_model(model: str, server: Server, owner: Owner) -> dict[str, Any]:
    """The model of that name."""
    check_model(server, model)
    return _model(server)


def _model(server: Service) -> dict[str, Any]:
    return {"id": server.engine.name, "object": "model", "created": server.began, "owned_by": "headwater"}


def check_model(server: Service, model: str) -> None:
    """Raises Refused for a model that is not the one loaded."""
    if model != server.engine.name:
        raise Refused(
            404,
            f"The model {model!r} does not exist; this server has {server.engine.name!r}.",
            param="model",
            code="model_not_found",
        )


def most_tokens(server: Service, given: int | None, name: str) -> int:
    """How long an answer may get. Raises Refused for more than the server allows."""
    most = server.options.most_tokens
    if given is not None and given > most:
        raise Refused(400, f"{name} is {given:,}, and this server generates at most {most:,} tokens.", param=name)
    return min(server.manner.max_tokens, most) if given is None else given


# Chat.


@router.post("/v1/chat/completions", tags=["OpenAI"], responses=EVENTS)
async def chat_completions(
    body: ChatRequest,
    request: Request,
    server: Server,
    owner: Owner,
    x_headwater_session: Named = None,
    x_headwater_history: Whole = None,
) -> Any:
    """An answer to the newest message. History that the session has is not computed again.

    The response headers say which session it is (`x-headwater-session`), how it was found (`x-headwater-how`: new,
    continued, shortened, edited), and how many tokens were computed and are held (`x-headwater-fed`, `-held`).
    """
    refuse_unsupported(body)
    check_model(server, body.model)
    history, text = history_of(body.messages)
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    given = one_of(max_completion_tokens=body.max_completion_tokens, max_tokens=body.max_tokens)
    question = Question(
        history=history,
        text=text,
        sampling=sampled(server.manner, body.sampling),
        max_tokens=most_tokens(server, given, "max_tokens"),
        stop=checked_stops(body.stop or ()),
        session=session_named(None if x_headwater_session is None else unquote(x_headwater_session), body.user),
        whole=x_headwater_history == "whole",
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    answering = server.ask(owner, question)
    asked = await first(answering, request)
    base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": server.engine.name}
    tell = _Chat(server.engine, base, asked, body.logprobs is True)
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage is True
        return streamed(answering, request, tell.chunks, usage=usage, headers=told(asked))
    events = await whole(answering, request)
    return JSONResponse(tell.whole(events), headers=told(asked))


class _Chat:
    """An answer in the shape of a chat completion, whole or in chunks."""

    def __init__(self, engine: Engine, base: dict[str, Any], asked: Asked, logprobs: bool) -> None:
        self._engine, self._base, self._asked, self._logprobs = engine, base, asked, logprobs

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        done = events[-1] if isinstance(events[-1], Done) else None
        pieces = [event for event in events if isinstance(event, Piece)]
        likely = [each for piece in pieces for each in piece.likely]
        return {
            **self._base,
            "object": "chat.completion",
            "system_fingerprint": None,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "".join(p.text for p in pieces), "refusal": None},
                    "logprobs": self._logprobs_of(likely),
                    "finish_reason": finish(done),
                }
            ],
            "usage": usage_of(self._asked, done),
            "headwater": extra(self._asked, done),
        }

    def chunks(self, event: Event | None, usage: bool) -> list[dict[str, Any]]:
        """What to send for an event; None is the beginning."""
        base = {**self._base, "object": "chat.completion.chunk", "system_fingerprint": None}
        if usage:
            base["usage"] = None
        if event is None:
            return [{**base, "choices": [self._choice({"role": "assistant", "content": "", "refusal": None})]}]
        if isinstance(event, Piece):
            return [{**base, "choices": [self._choice({"content": event.text}, event.likely)]}]
        if not isinstance(event, Done):
            return []
        out = [
            {
                **base,
                "choices": [{**self._choice({}), "finish_reason": finish(event)}],
                "headwater": extra(self._asked, event),
            }
        ]
        return [*out, {**base, "choices": [], "usage": usage_of(self._asked, event)}] if usage else out

    def _choice(self, delta: dict[str, Any], likely: Sequence[Likely] = ()) -> dict[str, Any]:
        logprobs = self._logprobs_of(likely) if likely else None
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs_of(self, likely: Sequence[Likely]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._token(each.token, each.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in each.others],
            }
            for each in likely
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._engine.decode([token])
        broken = "\ufffd" in text  # a part of a character has no text of its own
        return {"token": text, "logprob": logprob, "bytes": None if broken else list(text.encode())}


# Completions.


@router.post("/v1/completions", tags=["OpenAI"], responses=EVENTS)
async def completions(body: CompletionRequest, request: Request, server: Server, owner: Owner) -> Any:
    """What comes after a text, in the budget of a session but without one."""
    refuse_unsupported(body)
    check_model(server, body.model)
    answering = server.go_on(
        owner,
        body.prompt if isinstance(body.prompt, str) else body.prompt[0],
        sampling=sampled(server.manner, body.sampling),
        max_tokens=most_tokens(server, 16 if body.max_tokens is None else body.max_tokens, "max_tokens"),
        stop=checked_stops(body.stop or ()),
    )
    asked = await first(answering, request)
    base = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": server.engine.name,
        "system_fingerprint": None,
    }

    def chunks(event: Event | None, usage: bool) -> list[dict[str, Any]]:
        if isinstance(event, Piece):
            return [{**base, "choices": [_text_choice(event.text, None)]}]
        if not isinstance(event, Done):
            return []
        out = [{**base, "choices": [_text_choice("", finish(event))]}]
        return [*out, {**base, "choices": [], "usage": usage_of(asked, event)}] if usage else out

    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage is True
        return streamed(answering, request, chunks, usage=usage, headers={})
    events = await whole(answering, request)
    done = events[-1] if isinstance(events[-1], Done) else None
    text = "".join(event.text for event in events if isinstance(event, Piece))
    return {**base, "choices": [_text_choice(text, finish(done))], "usage": usage_of(asked, done)}


def _text_choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


# Embeddings.


class EmbeddingRequest(Wire):
    """`POST /v1/embeddings`."""

    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


@router.post("/v1/embeddings", tags=["OpenAI"])
async def embeddings(body: EmbeddingRequest, server: Server, owner: Owner) -> dict[str, Any]:
    """Texts as vectors of unit length, by the small model of the extra `memory`."""
    embedder = await asyncio.to_thread(server.embedder)
    if body.model != embedder.name:
        raise Refused(
            404,
            f"The model {body.model!r} makes no vectors here; {embedder.name!r} does.",
            param="model",
            code="model_not_found",
        )
    if body.dimensions not in (None, embedder.dim):
        raise Refused(400, f"dimensions can only be {embedder.dim}, got {body.dimensions}.", param="dimensions")
    texts = [body.input] if isinstance(body.input, str) else body.input
    empty = next((index for index, text in enumerate(texts) if not text), None)
    if empty is not None:
        raise Refused(400, "a text must not be empty.", param=f"input[{empty}]")
    vectors = await asyncio.to_thread(embedder.embed, texts)
    packed = body.encoding_format == "base64"
    return {
        "object": "list",
        "model": embedder.name,
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if packed
                else np.asarray(vector, dtype=float).tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    }


# What answers have in common.


async def first(answering: Answering, request: Request) -> Asked:
    """Wait for the message to be fed. Raises Refused; a client that goes meanwhile ends it."""
    return await _unless_gone(answering, request, answering.asked())


async def whole(answering: Answering, request: Request) -> list[Event]:
    """Wait for the end. Raises Refused for an answer that did not come to its own end."""

    async def gather() -> list[Event]:
        return [event async for event in answering.events()]

    events = await _unless_gone(answering, request, gather())
    last = events[-1]
    if isinstance(last, Failed):
        raise refusal(last.error)
    if isinstance(last, Done) and last.reason not in ("stop", "length"):
        raise ended(last.reason, answering.timeout_s)
    return events


async def _unless_gone(answering: Answering, request: Request, waiting: Any) -> Any:
    wanted, gone = asyncio.ensure_future(waiting), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            answering.end("left")
        return await wanted
    except asyncio.CancelledError:
        answering.end("left")
        wanted.cancel()
        raise
    finally:
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


Chunks = Callable[[Event | None, bool], list[dict[str, Any]]]


def streamed(
    answering: Answering, request: Request, chunks: Chunks, *, usage: bool, headers: dict[str, str]
) -> StreamingResponse:
    """An answer as server-sent events, as it is generated. A client that goes ends it."""

    async def lines() -> AsyncIterator[str]:
        over = False
        try:
            for chunk in chunks(None, usage):
                yield sse(chunk)
            async for event in answering.events():
                over = isinstance(event, (Done, Failed))
                failed = failure(event, answering.timeout_s)
                if failed is not None:
                    yield sse(failed.body)
                    return
                for chunk in chunks(event, usage):
                    yield sse(chunk)
            yield "data: [DONE]\n\n"
        finally:
            if not over:
                answering.end("left")

    return StreamingResponse(lines(), media_type="text/event-stream", headers={**headers, "x-accel-buffering": "no"})


def failure(event: Event, timeout_s: float) -> Refused | None:
    """What to say when this event is no good end."""
    if isinstance(event, Failed):
        return refusal(event.error)
    if isinstance(event, Done) and event.reason not in ("stop", "length"):
        return ended(event.reason, timeout_s)
    return None


def sse(content: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def finish(done: Done | None) -> str:
    """Why an answer ended, as the original says it."""
    return "stop" if done is not None and done.reason == "stop" else "length"


def told(asked: Asked) -> dict[str, str]:
    """The headers that say which session it is and what it took."""
    return {
        "x-headwater-session": quote(asked.session, safe=" "),
        "x-headwater-how": asked.how,
        "x-headwater-fed": str(asked.fed),
        "x-headwater-held": str(asked.held),
    }


def usage_of(asked: Asked, done: Done | None) -> dict[str, Any]:
    """Tokens; the cached ones are those that were not computed for this request."""
    tokens = 0 if done is None else done.tokens
    return {
        "prompt_tokens": asked.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": asked.prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": max(0, asked.prompt_tokens - asked.fed), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def extra(asked: Asked, done: Done | None) -> dict[str, Any]:
    """What the original has no field for."""
    stats = None if done is None else done.stats
    return {
        "session": asked.session,
        "how": asked.how,
        "fed_tokens": asked.fed,
        "held_tokens": asked.held if stats is None else stats.held,
        "evicted_turns": None if stats is None else stats.evicted_turns,
        "evicted_tokens": None if stats is None else stats.evicted_tokens,
        "notice": None if stats is None else stats.notice,
        "trouble": None if stats is None else stats.trouble,
        "recalled": [] if stats is None else list(stats.recalled),
        "surprise": None if done is None else done.surprise,
        "tokens_per_s": None if stats is None else stats.tokens_per_s,
    }
