"""The chat command: a conversation on a terminal, or one answer in a pipe.

Knows where standard input and output lead. Does not know how a conversation works (`session`) or looks (`screen`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import fields

from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.errors import InputFileError, UsageError
from headwater.policies import POLICIES


def run(
    *,
    model: str,
    engine: str,
    system: str | None,
    template: str | None,
    policy: str,
    budget: int,
    sinks: int | None,
    sampling: Sampling,
    max_tokens: int,
    stop: Sequence[str],
) -> int:
    """Chat on the terminal until the user leaves; without one, answer the whole of standard input as one message.

    `sinks` is for the policies that have them. Returns the exit code.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    message = None if terminal else _whole_input()
    with _loading(model) if terminal else redirect_stdout(sys.stderr):
        chat = Chat.open(
            model,
            engine=engine,
            system=system,
            template=template,
            policy=policy,
            budget=budget,
            sinks=sinks if _has_sinks(policy) else None,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
        )
    with chat:
        if message is not None:
            return _answer(chat, message)
        from headwater.chat.screen import Screen

        return Screen(chat, policy=policy, engine=engine).talk()


def _has_sinks(policy: str) -> bool:
    return policy in POLICIES and any(field.name == "sinks" for field in fields(POLICIES[policy]))


def _loading(model: str) -> AbstractContextManager[object]:
    """Something that moves while the model loads."""
    from rich.console import Console

    return Console().status(f"loading {model}")


def _whole_input() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputFileError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise UsageError("standard input is empty; pipe a message into it: echo hi | headwater chat")
    return text.removesuffix("\n")


def _answer(chat: Chat, message: str) -> int:
    """The answer alone on standard output; what the user must know beside it goes to standard error."""
    for piece in chat.send(message):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if (notice := chat.stats().notice) is not None:
        print(f"headwater: {notice}", file=sys.stderr)
    if not chat.turns[-1].finished:
        print(f"headwater: the answer was cut at {chat.max_tokens} tokens (--max-tokens)", file=sys.stderr)
    return 0
