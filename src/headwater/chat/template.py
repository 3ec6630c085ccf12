"""The pieces of a model's chat template, cut out once.

Knows how to find them: a conversation is rendered around sentinels, and what lies between those is the template. Does
not know any template's language, nor what was said. A message is then the pieces around the encoded text, so history is
never rendered or tokenised again, and a user's text can never open or close a turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.engines.base import Engine
from headwater.errors import UnsupportedModel

_SYSTEM = "headwaterSentinelSystem"
_TEXTS = tuple(f"headwaterSentinel{name}" for name in ("Alpha", "Bravo", "Charlie", "Delta", "Echo"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Token ids around what is said.

    `head` is everything before the first user message: the system prompt, or what the template itself puts there.
    `user_close` closes a user message and opens the answer. `first_user_open` differs from `user_open` only in
    templates whose first turn looks different. `trims` says that the template strips white space around a message, so
    `question` does too.
    """

    head: tuple[int, ...]
    first_user_open: tuple[int, ...]
    user_open: tuple[int, ...]
    user_close: tuple[int, ...]
    answer_close: tuple[int, ...]
    trims: bool

    @classmethod
    def derive(cls, engine: Engine, system: str | None) -> Template:
        """Cut the engine's template. Raises UnsupportedModel when it refuses a system prompt, drops or reorders what it
        is given, or changes from turn to turn."""
        before, _, between, _, again, last = _cut(engine, _conversation(None))
        if again != between:
            raise UnsupportedModel(
                f"the chat template of {engine.name} puts {between!r} before the second user message and {again!r} "
                "before the third, so it cannot be applied one message at a time"
            )
        closing = _cut(engine, _conversation(None)[:2], open_answer=False)[-1]
        answer_close = _common(engine.encode(between, special=True), engine.encode(closing, special=True))
        user_open = engine.encode(between, special=True)[len(answer_close) :]
        trims = _trims(engine)
        if system is None:
            opening = engine.encode(before, special=True)
        else:
            opening = _opening(engine, system.strip() if trims else system)
        shared = len(_common(opening[::-1], user_open[::-1]))
        cut = len(opening) - shared
        return cls(
            head=tuple(opening[:cut]),
            first_user_open=tuple(opening[cut:]),
            user_open=tuple(user_open),
            user_close=tuple(engine.encode(last, special=True)),
            answer_close=tuple(answer_close),
            trims=trims,
        )

    def question(self, engine: Engine, text: str, *, first: bool = False) -> list[int]:
        """Token ids of a user message and of what opens its answer."""
        opened = self.first_user_open if first else self.user_open
        return [*opened, *engine.encode(text.strip() if self.trims else text, special=False), *self.user_close]

    def wording(self, engine: Engine) -> str:
        """What tells this template and tokenizer from others: ids made with another one mean something else here."""
        pieces = [self.first_user_open, self.user_open, self.user_close, self.answer_close, self.trims]
        known = json.dumps([engine.facts().tokenizer_sha256, *pieces])
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def turn_tokens(self) -> int:
        """What a message and its answer cost beside their texts."""
        return len(self.user_open) + len(self.user_close) + len(self.answer_close)


def _conversation(system: str | None) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(_TEXTS)]


def _cut(engine: Engine, messages: Sequence[dict[str, str]], *, open_answer: bool = True) -> list[str]:
    """What the template writes before, between and after the contents."""
    rendered = engine.render(messages, open_answer=open_answer)
    contents = [message["content"] for message in messages]
    for message in messages:
        count = rendered.count(message["content"])
        if count != 1:
            what = "drops" if count == 0 else "repeats"
            raise UnsupportedModel(f"the chat template of {engine.name} {what} the {message['role']} message")
    places = [rendered.index(content) for content in contents]
    if places != sorted(places):
        raise UnsupportedModel(f"the chat template of {engine.name} puts messages in another order")
    starts = [0, *(place + len(content) for place, content in zip(places, contents, strict=True))]
    return [rendered[start:stop] for start, stop in zip(starts, [*places, len(rendered)], strict=True)]


def _opening(engine: Engine, system: str) -> list[int]:
    """Token ids of everything before the first user's text. Control tokens in the prompt itself stay plain text."""
    try:
        before, after, *_ = _cut(engine, _conversation(_SYSTEM))
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{engine.name} cannot take a system prompt: {error}; leave it out, or put it into the first message"
        ) from error
    return [*engine.encode(before, special=True), *engine.encode(system), *engine.encode(after, special=True)]


def _trims(engine: Engine) -> bool:
    padded = f"\n {_TEXTS[0]} \n"
    return padded not in engine.render([{"role": "user", "content": padded}], open_answer=True)


def _common(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The longest common prefix."""
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return list(left[:length])
