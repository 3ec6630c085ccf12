"""Conversations to measure on: read from a file, or the one that ships with the package.

Knows file formats and what makes a conversation: roles that alternate, beginning with the user. Does not know models,
templates or tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from headwater.errors import InputFileError, UsageError

ROLES = ("system", "user", "assistant")
BUNDLED = "multiwoz-01"
TEXT_SUFFIXES = frozenset({".txt", ".md", ".text"})
EXAMPLE = '{"role": "user", "content": "Hello"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A user's message and the answer to it."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What was said, and every choice that reading it took (`choices`, to be shown to the user)."""

    name: str
    sha256: str
    exchanges: tuple[Exchange, ...]
    system: str | None = None
    attribution: str = ""
    choices: tuple[str, ...] = ()

    @property
    def turns(self) -> int:
        """Messages, questions and answers; the system prompt is not a turn."""
        return 2 * len(self.exchanges)

    def first(self, turns: int) -> Conversation:
        """The first `turns` messages. An odd number leaves its last question out, which has no answer to measure."""
        if turns < 2:
            raise UsageError(f"turns must be at least 2, a question and its answer; got {turns}")
        if turns >= self.turns:
            return self
        note = f"the first {turns // 2 * 2} of {self.turns} turns"
        return replace(self, exchanges=self.exchanges[: turns // 2], choices=(*self.choices, note))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    role: str
    text: str
    where: str


def load(path: Path | None) -> Conversation:
    """Read a conversation; without a path, the one that ships with the package.

    A JSON Lines file holds one message a line, `{"role": ..., "content": ...}` (or `text` for `content`), or one
    object with a list `turns`, as the bundled file has. A plain text file (`.txt`, `.md`) holds paragraphs, which
    alternate between user and assistant. Raises InputFileError, naming file and line, for anything else.
    """
    if path is None:
        raw = resources.files("headwater.data").joinpath(f"{BUNDLED}.json").read_bytes()
        return parse(raw, f"{BUNDLED}.json")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse(raw, str(path))


def parse(raw: bytes, name: str) -> Conversation:
    """The conversation in the bytes of a file called `name`."""
    text = decode(raw, name)
    attribution, choices = "", []
    if Path(name).suffix.lower() in TEXT_SUFFIXES or not _looks_like_json(text, name):
        messages = list(_paragraphs(text))
        choices.append(
            "a plain text file: its paragraphs alternate between user and assistant, beginning with the user"
        )
    else:
        messages, attribution = _json_messages(text, name)
    system, exchanges, notes = _pair(messages, name)
    return Conversation(
        name=Path(name).stem,
        sha256=hashlib.sha256(raw).hexdigest(),
        exchanges=exchanges,
        system=system,
        attribution=attribution,
        choices=(*choices, *notes),
    )


def decode(raw: bytes, name: str) -> str:
    """UTF-8 text of a file. Raises InputFileError with the line of the first byte that is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputFileError(f"{name}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _looks_like_json(text: str, name: str) -> bool:
    return Path(name).suffix.lower() in {".json", ".jsonl", ".ndjson"} or text.lstrip()[:1] in {"{", "["}


def _paragraphs(text: str) -> Iterator[_Message]:
    line, count, block = 0, 0, list[str]()
    for number, content in enumerate([*text.splitlines(), ""], start=1):
        if content.strip():
            line = line if block else number
            block.append(content.strip())
        elif block:
            yield _Message(role=ROLES[1 + count % 2], text="\n".join(block), where=f"line {line}")
            count, block = count + 1, []


def _json_messages(text: str, name: str) -> tuple[list[_Message], str]:
    """Messages and attribution of a JSON document, or of JSON Lines."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InputFileError(f"{name}: the conversation is empty; write one message a line, such as {EXAMPLE}")
    if Path(name).suffix.lower() == ".json":
        return _session(_loads(text, name, 1), name, "line 1")
    first = _loads(lines[0][1], name, lines[0][0])
    if isinstance(first, dict) and "turns" in first:
        if len(lines) > 1:
            raise InputFileError(
                f"{name}, line {lines[1][0]}: a second conversation; a file holds one, so copy the line you want into "
                f"a file of its own"
            )
        return _session(first, name, f"line {lines[0][0]}")
    return [_message(_loads(line, name, number), name, f"line {number}") for number, line in lines], ""


def _loads(text: str, name: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = line + error.lineno - 1
        raise InputFileError(
            f"{name}, line {where}: not JSON ({error.msg}, column {error.colno}); a message is {EXAMPLE}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{name}, line {line}: not JSON that can be read ({error})") from error


def _session(value: object, name: str, where: str) -> tuple[list[_Message], str]:
    turns = value.get("turns") if isinstance(value, dict) else value
    if not isinstance(turns, list):
        raise InputFileError(f"{name}, {where}: a list of messages is missing; give it as `turns`, each {EXAMPLE}")
    messages = [_message(turn, name, f"turn {index}") for index, turn in enumerate(turns, start=1)]
    fields = value if isinstance(value, dict) else {}
    known = [str(fields[key]) for key in ("source", "license", "copyright", "paper") if key in fields]
    return messages, "; ".join(known)


def _message(value: object, name: str, where: str) -> _Message:
    if not isinstance(value, dict):
        raise InputFileError(f"{name}, {where}: a message must be an object such as {EXAMPLE}")
    role = value.get("role")
    if role not in ROLES:
        raise InputFileError(f"{name}, {where}: unknown role {role!r}; known: {', '.join(sorted(ROLES))}")
    if ("content" in value) == ("text" in value):
        raise InputFileError(f"{name}, {where}: a message has its text in one of `content` and `text`")
    text = value.get("content", value.get("text"))
    if not isinstance(text, str) or not text.strip():
        raise InputFileError(f"{name}, {where}: the text is missing; it must be a string that is not empty")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InputFileError(f"{name}, {where}: the text holds half of a surrogate pair, which is no character")
    return _Message(role=role, text=text, where=where)


def _pair(messages: Sequence[_Message], name: str) -> tuple[str | None, tuple[Exchange, ...], tuple[str, ...]]:
    """System prompt, exchanges and notes. Raises InputFileError where the roles do not alternate."""
    system = messages[0].text if messages and messages[0].role == "system" else None
    spoken = messages[0 if system is None else 1 :]
    for index, message in enumerate(spoken):
        expected = ROLES[1 + index % 2]
        if message.role != expected:
            raise InputFileError(
                f"{name}, {message.where}: expected a message of the {expected}, got the role {message.role!r}; after "
                f"an optional first system message, user and assistant alternate, and the user begins"
            )
    pairs = zip(spoken[0::2], spoken[1::2], strict=False)
    exchanges = tuple(Exchange(question=user.text, answer=answer.text) for user, answer in pairs)
    if not exchanges:
        raise InputFileError(f"{name}: the conversation is empty; it needs a user's message and an answer at least")
    odd = len(spoken) % 2
    return system, exchanges, (f"the last message ({spoken[-1].where}) has no answer and is left out",) if odd else ()
