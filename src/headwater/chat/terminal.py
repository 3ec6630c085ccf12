"""The chat command: a conversation on a terminal, or one answer in a pipe.

Knows where standard input and output lead. Does not know how a conversation works (`session`) or looks (`screen`).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

from headwater.chat.session import Chat
from headwater.errors import InputFileError, UsageError


def run(*, model: str | None, engine: str | None, **options: Any) -> int:
    """Chat on the terminal until the user leaves; without one, answer the whole of standard input as one message.

    `options` are those of `Chat.open`; None is the default, or what the session has. Returns the exit code.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    message = None if terminal else _whole_input()
    with _loading(model or "the model") if terminal else redirect_stdout(sys.stderr):
        chat = Chat.open(model, engine=engine, **options)
    with chat:
        if message is not None:
            return _answer(chat, message)
        from headwater.chat.screen import Screen

        return Screen(chat).talk()


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
    now = chat.stats()
    for said in (now.notice, now.trouble):
        if said is not None:
            print(f"headwater: {said}", file=sys.stderr)
    if now.recalled:
        print(f"headwater: recalled for this answer: {'; '.join(now.recalled)}", file=sys.stderr)
    if not chat.turns[-1].finished:
        print(f"headwater: the answer was cut at {chat.max_tokens} tokens (--max-tokens)", file=sys.stderr)
    if chat.session is not None:
        chat.idle()
    return 0
