"""What goes over the wire to the chat and completion endpoints: the fields that are known, and what they may hold.

Knows OpenAI's names. Does not know sessions or models. A field that the original has and this server has not is listed
with the values that change nothing; any other value of it is refused by name, and so is a field that nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headwater.server.history import Exchange, History
from headwater.server.refused import Refused

SESSION_USER = "session:"
"""A `user` that begins so names the session."""


class Wire(BaseModel):
    """Nothing is converted and nothing is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Wire):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Wire):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        """What it says; its parts one after another."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Wire):
    """What a stream ends with."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


Temperature = Annotated[float, Field(ge=0, le=2)]
Stop = str | Annotated[list[str], Field(max_length=16)]


class Drawing(Wire):
    """How tokens are drawn. `top_k`, `min_p` and `repetition_penalty` are this server's own."""

    model: str
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool | None = None
    user: str | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """What was given of it."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class ChatRequest(Drawing):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    service_tier: Any = None
    store: Any = None
    metadata: Any = None
    web_search_options: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionRequest(Drawing):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    logprobs: None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "web_search_options": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
}
"""Fields of the original that this server does not have, with the values that ask for nothing. Without tools,
`parallel_tool_calls` is about nothing either way."""

WHY = {
    "store": "conversations are kept as sessions, see /api/sessions",
    "n": "one answer is generated at a time",
    "tools": "models here call no tools",
    "response_format": "answers are text",
}


def refuse_unsupported(given: Wire, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Raises Refused for a field that asks for what is not there."""
    for name in type(given).model_fields:
        value = getattr(given, name)
        # Without the types, True would be 1 and 0 would be False.
        if name in neutral and value is not None and not any(_same(value, each) for each in neutral[name]):
            allowed = " or ".join(repr(each) for each in neutral[name])
            why = f"; {WHY[name]}" if name in WHY else ""
            raise Refused(
                400,
                f"Unsupported parameter: {name!r} is not supported{f' but for {allowed}' if allowed else ''}{why}. "
                "Leave it out.",
                param=name,
                code="unsupported_parameter",
            )


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def history_of(messages: list[Message]) -> tuple[History, str]:
    """What was said before, and the newest message. Raises Refused naming the message that is out of place."""
    for index, message in enumerate(messages):
        for name in ("name", "tool_calls", "annotations"):
            if getattr(message, name):
                field = f"messages[{index}].{name}"
                raise Refused(
                    400, f"Unsupported parameter: {field!r} is not supported", param=field, code="unsupported_parameter"
                )
        if message.content is None or not (message.text.strip() or message.role == "assistant"):
            _refuse(index, "content", f"a {message.role} message must have a text that is not empty")
    system = None
    rest = list(enumerate(messages))
    if messages[0].role in ("system", "developer"):
        system, rest = messages[0].text, rest[1:]
    lone = None
    if rest and rest[0][1].role == "assistant":
        lone, rest = rest[0][1].text, rest[1:]
    for place, (index, message) in enumerate(rest):
        due = "assistant" if place % 2 else "user"
        if message.role != due:
            said = (
                "system messages come first, and there is one at most"
                if message.role in ("system", "developer")
                else (f"after a {'user' if place % 2 else 'system or assistant'} message comes one of the {due}")
            )
            _refuse(index, "role", f"{message.role!r} is out of place here: {said}")
    if len(rest) % 2 == 0:
        _refuse(len(messages) - 1, "role", "the last message must be the user's, for there to be something to answer")
    texts = [message.text for _, message in rest]
    exchanges = tuple(Exchange(question=texts[place], answer=texts[place + 1]) for place in range(0, len(texts) - 1, 2))
    if lone is not None and not exchanges:
        _refuse(1 if system is not None else 0, "role", "a conversation begins with a message of the user")
    return History(system=system, exchanges=exchanges, lone_answer=lone), texts[-1]


def _refuse(index: int, field: str, why: str) -> None:
    raise Refused(400, f"Invalid 'messages[{index}].{field}': {why}.", param=f"messages[{index}].{field}")


def one_of(**given: Any) -> Any:
    """The one value of several names of the same. Raises Refused when they differ."""
    values = {name: value for name, value in given.items() if value is not None}
    if len(set(values.values())) > 1:
        names = " and ".join(values)
        raise Refused(400, f"{names} were both given and differ; give one of them.", param=next(iter(values)))
    return next(iter(values.values()), None)


def session_named(header: str | None, user: str | None) -> str | None:
    """The session that a request names. Raises Refused when header and `user` name two."""
    by_user = user.removeprefix(SESSION_USER) if user is not None and user.startswith(SESSION_USER) else None
    if header is not None and by_user is not None and header != by_user:
        raise Refused(400, f"x-headwater-session names {header!r} and user names {by_user!r}; name one.", param="user")
    return header if header is not None else by_user


class Reason(BaseModel):
    """What went wrong. `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class Trouble(BaseModel):
    """An error."""

    error: Reason


EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What the document says beside JSON of an answer that can be a stream."""
